"""Fine-tuning reads the encoder of its source: which words of a pre-training it compares."""

import pytest
import torch
import yaml
from small_vqgan import write_untrained_run
from tiny import VIT, tiny
from transformers import ViTMAEConfig, ViTMAEForPreTraining

from megavis.checkpoint.format.folder import latest_checkpoint
from megavis.checkpoint.format.tensor_reader import read_weights
from megavis.cli import main
from megavis.config.load import load_config
from megavis.grammar.same_run import source_differences

pytestmark = pytest.mark.once


@pytest.fixture(scope="module")
def imported(tmp_path_factory):
    """A run imported from a folder like facebook/vit-mae-base, whose targets are plain pixels."""
    folder = tmp_path_factory.mktemp("imported")
    settings = ViTMAEConfig(
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
        layer_norm_eps=1e-6,
        image_size=16,
        patch_size=4,
        decoder_hidden_size=8,
        decoder_num_hidden_layers=1,
        decoder_num_attention_heads=2,
        decoder_intermediate_size=32,
        norm_pix_loss=False,
    )
    ViTMAEForPreTraining(settings).save_pretrained(folder / "hub")
    assert main(["import", "huggingface", str(folder / "hub"), str(folder / "source")]) == 0
    return folder / "source"


def test_a_released_mae_is_finetuned_by_the_defaults_of_the_paper(imported, image_shards, tmp_path):
    """Its targets and its decoder are other ones, of which fine-tuning reads nothing."""
    tree = yaml.safe_load(
        tiny("{name: mae, patch_size: 4}", shards=image_shards, validates=True, model=VIT)
    )
    tree["training"] |= {"steps": 1, "validate_every": 1}
    tree["optimizer"] = {"learning_rate": 1e-30}
    tree["finetune"] = {"num_classes": 10, "from_run": str(imported)}
    (tmp_path / "tuned.yaml").write_text(yaml.safe_dump(tree))
    assert (
        main(["finetune", str(tmp_path / "tuned.yaml"), "--device", "cpu", f"output={tmp_path}"])
        == 0
    )
    before, after = (
        read_weights(latest_checkpoint(run), "blocks.") for run in (imported, tmp_path / "tiny")
    )
    assert before.keys() == after.keys()
    for name, weight in before.items():
        torch.testing.assert_close(after[name], weight, rtol=0, atol=0)
    assert (
        main(["export", str(tmp_path / "tiny"), "--to", "huggingface", str(tmp_path / "out")]) == 0
    )
    card = (tmp_path / "out" / "README.md").read_text()
    assert "| starts from | `source`, released weights: hub; model.safetensors has the SHA" in card


def differences(before, after, folder, **tuning):
    """Return what is said of fine-tuning with an objective from a run with another one."""

    def read(objective, **sections):
        (folder / "run.yaml").write_text(tiny(objective, model=VIT, **sections))
        return load_config(folder / "run.yaml").config

    sections = {"training": {"validate_every": 1}, "finetune": {"num_classes": 3, **tuning}}
    return list(source_differences(read(before), read(after, validates=True, **sections)))


WORDS = (
    "{name: compose, reads: {kind: patches, patch_size: 4}, asks: {kind: mask},"
    " schedule: {kind: masked, mask_ratio: %s, features: %s}, density: {kind: %s}}"
)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (
            "{name: mae, patch_size: 4, mask_shape: grid}",
            "{name: mae, patch_size: 4, mask_ratio: 0.5}",
        ),
        ("{name: mae, patch_size: 4, decoder: {num_layers: 1}}", "{name: mae, patch_size: 4}"),
        # Each of these keys needs others.
        (
            "{name: darl, patch_size: 4, loss: diffusion, decoder: mlp, noise_a: 0.1}",
            "{name: darl, patch_size: 4, normalize_targets: true}",
        ),
        (
            "{name: mp3, patch_size: 4, mask_ratio: 0.5}",
            "{name: mp3, patch_size: 4, mask_ratio: 0.75}",
        ),
        (WORDS % (0.3, "whole", "squared_error"), WORDS % (0.5, "whole", "gaussian_mixture")),
    ],
)
def test_words_of_the_pretraining_may_differ(tmp_path, before, after):
    assert differences(before, after, tmp_path) == []
    assert differences(after, before, tmp_path) == []


@pytest.mark.parametrize(
    ("before", "after", "key"),
    [
        (
            "{name: mae, patch_size: 8, normalize_targets: false, mask_ratio: 0.5}",
            "{name: mae, patch_size: 4}",
            "objective.patch_size 8, and this config has 4",
        ),
        (
            "{name: mae, patch_size: 4, class_token: false, decoder: {num_layers: 1}}",
            "{name: mae, patch_size: 4}",
            "objective.class_token false, and this config has true",
        ),
        # Features of partly hidden images.
        (
            WORDS % (0.3, "masked", "squared_error"),
            WORDS % (0.5, "masked", "squared_error"),
            "objective.schedule.mask_ratio 0.3, and this config has 0.5",
        ),
    ],
)
def test_words_of_the_features_may_not(tmp_path, before, after, key):
    (text,) = differences(before, after, tmp_path)
    assert text == f"was trained with {key}; fine-tuning keeps the architecture"


def test_the_papers_own_loss_needs_all_words(tmp_path):
    words = "{name: darl, patch_size: 4, normalize_targets: %s}"
    (text,) = differences(words % "true", words % "false", tmp_path, generative_weight=0.5)
    assert text.startswith("was trained with objective.normalize_targets true, and this config has")


def test_the_tokenizer_of_predicted_ids_may_be_another_or_none(image_shards, tmp_path, capsys):
    """A network that reads patches; with the paper's own loss, its ids keep their meaning."""
    (tmp_path / "vqgan").mkdir()
    vqgan = write_untrained_run(tmp_path / "vqgan")
    ids = f"loss: ids, vocabulary_size: 12, tokenizer: {vqgan}"
    objective = f"{{name: darl, patch_size: 4, {ids}}}"

    def run(verb, name, objective, **sections):
        sections = {"name": name, "output": str(tmp_path), "shards": image_shards, **sections}
        (tmp_path / "run.yaml").write_text(tiny(objective, **sections))
        return main([verb, str(tmp_path / "run.yaml"), "--device", "cpu"])

    assert run("train", "source", objective, training={"steps": 1}) == 0
    write_untrained_run(tmp_path / "vqgan", seed=1)
    sections = {"training": {"steps": 1, "validate_every": 1}, "validates": True}
    tuning = {"num_classes": 10, "from_run": str(tmp_path / "source")}
    for name, other in (("same", objective), ("none", "{name: darl, patch_size: 4}")):
        code = run("finetune", name, other, finetune=tuning, **sections)
        assert code == 0, capsys.readouterr().err
    tuning["generative_weight"] = 1.0
    assert run("finetune", "joint", objective, finetune=tuning, **sections) == 2
    assert "was trained on other tokens than " in capsys.readouterr().err
