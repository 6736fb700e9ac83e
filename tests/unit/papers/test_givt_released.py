"""Imported GIVT runs against golden values of the released code."""

from pathlib import Path

import numpy as np
import pytest
import torch
from golden_givt import (
    GOLDEN,
    MODELS,
    causal_weights_of_width_16,
    conditions,
    golden,
    import_file,
    import_golden,
)
from latent_shards import write_latent_shards
from tiny import tiny

import megavis
from megavis.cli import main
from megavis.config.errors import UserError
from megavis.config.load import load_config
from megavis.data.format.manifest import Manifest
from megavis.data.loading.dataset import ShardDataset
from megavis.data.loading.loader import Batch
from megavis.data.loading.opening import ShardOpener
from megavis.papers import OBJECTIVES
from megavis.parallel.context import close_context, current_context, open_context
from megavis.parallel.launch import read_launch
from megavis.tokenizers.network_tokenizer import open_tokenizer, read_config

TOLERANCE = {"rtol": 0, "atol": 1e-4}


@pytest.fixture(scope="module", autouse=True)
def leave_job():
    yield
    close_context()


def open_golden(folder, name):
    return megavis.load(import_golden(folder, name), device="cpu")


def open_imported(folder, form, file, *options):
    return megavis.load(import_file(folder, form, file, *options), device="cpu")


def stacked(arrays):
    """Stack the arrays of all layers on axis 1, as in the large checkpoints."""
    first = "params/decoder/EncDecBlock0/"
    inner = [name.removeprefix(first) for name in arrays if name.startswith(first)]
    together = {
        f"params/decoder/EncDecBlock/{name}": np.stack(
            [arrays[f"params/decoder/EncDecBlock{layer}/{name}"] for layer in (0, 1)], axis=1
        )
        for name in inner
    }
    return {n: a for n, a in arrays.items() if "EncDecBlock" not in n} | together


@pytest.mark.parametrize("name", MODELS)
def test_outputs_and_nll_match_released_code(tmp_path, name):
    values, run = golden(name), open_golden(tmp_path, name)
    tokens = torch.from_numpy(values["tokens"])
    outputs = run.outputs(tokens, **conditions(values))
    torch.testing.assert_close(outputs, torch.from_numpy(values["logits"]), **TOLERANCE)
    nats = run.objective.density.per_token_loss(outputs, tokens)
    torch.testing.assert_close(nats, torch.from_numpy(values["nll"]), rtol=0, atol=1e-3)


def test_loss_of_masked_tokens_matches_released_code(tmp_path):
    """The trainer has `nll.mean(where=input_mask)`, over the tokens of all images."""
    values, run = golden("givt_maskgit"), open_golden(tmp_path, "givt_maskgit")
    mask = torch.from_numpy(values["mask"]).clone()
    mask[0, 3:] = False  # So that the images differ in their masked tokens.
    paper, tokens = run.objective, torch.from_numpy(values["tokens"])
    paper.config = paper.config.model_copy(
        update={"training": paper.config.training.model_copy(update={"batch_size": len(mask)})}
    )
    paper.schedule.draw_hidden = lambda index: mask[index]
    paper.schedule.num_predicted = lambda index: mask[index].sum(1).float()
    batch = Batch(tokens, torch.from_numpy(values["labels"]), torch.arange(len(mask)))
    counted = paper.training_sequence(batch).targets[1:]
    loss = paper.loss(torch.from_numpy(values["logits"]), (tokens, *counted))
    assert len(set(mask.sum(1).tolist())) > 1
    assert float(loss) == pytest.approx(values["nll"][mask.numpy()].mean(), rel=1e-5)


def test_per_channel_density_is_imported(tmp_path):
    # The layout of the released models for dense prediction: d logits, without effect since softmax
    # over one component is 1, then d means and d scales.
    values = golden("givt_encoder_decoder")
    arrays = {name: array for name, array in values.items() if name.startswith("params/")}
    random = np.random.default_rng(0)
    for part in ("kernel", "bias"):
        name = f"params/decoder/LogitsDense/{part}"
        own = arrays[name][..., 1:]
        logits = random.normal(size=(*own.shape[:-1], own.shape[-1] // 2)).astype(np.float32)
        arrays[name] = np.concatenate([logits, own], axis=-1)
    assert arrays["params/decoder/LogitsDense/bias"].shape == (3 * values["tokens"].shape[-1],)
    np.savez(tmp_path / "uvim.npz", **arrays)
    run = open_imported(tmp_path, "givt", tmp_path / "uvim.npz")
    tokens = torch.from_numpy(values["tokens"])
    outputs = run.outputs(tokens, **conditions(values))
    assert not outputs[..., 0].any()
    torch.testing.assert_close(
        outputs[..., 1:], torch.from_numpy(values["logits"])[..., 1:], **TOLERANCE
    )
    nats = run.objective.density.per_token_loss(outputs, tokens)
    torch.testing.assert_close(nats, torch.from_numpy(values["nll"]), rtol=0, atol=1e-3)


def test_per_channel_mixture_is_refused(tmp_path, capsys):
    arrays = golden("givt_encoder_decoder")
    for part in ("kernel", "bias"):
        name = f"params/decoder/LogitsDense/{part}"
        shape = (*arrays[name].shape[:-1], 2 * 3 * arrays["tokens"].shape[-1])
        arrays[name] = np.zeros(shape, np.float32)
    np.savez(tmp_path / "mixtures.npz", **arrays)
    words = ["import", "givt", str(tmp_path / "mixtures.npz"), str(tmp_path / "run")]
    assert main(words) == 2
    assert "2 components for each of the" in capsys.readouterr().err


def test_encoder_checks_image_shape(tmp_path):
    values = golden("givt_encoder_decoder")
    run = open_imported(tmp_path, "givt", GOLDEN / "givt_encoder_decoder.npz")
    tokens = torch.from_numpy(values["tokens"])
    with pytest.raises(
        UserError, match=r"shape \[3, 16, 32, 3\]; this run expects \[b, 32, 32, 3\]"
    ):
        run.outputs(tokens, image=torch.from_numpy(values["image"])[:, ::2])
    with pytest.raises(UserError, match="give those for its encoder"):
        run.sample()
    folder = write_latent_shards(tmp_path / "s", shape=(8, 4, 4), num_classes=0, num_images=2)
    assert "without images" in "".join(run.objective.check_data(Manifest.read(folder)))


def test_stacked_layers_and_adapter_are_imported(tmp_path):
    arrays, adapter = causal_weights_of_width_16(), golden("adapter")
    names = [name for name in adapter if name.startswith("params/")]
    for name in names:
        arrays[name.replace("params/", "params/params_adaptor/")] = adapter[name]
    plain, together = tmp_path / "plain.npz", tmp_path / "together.npz"
    np.savez(plain, **arrays)
    np.savez(together, **stacked(arrays))
    latents = torch.from_numpy(adapter["z"]).permute(0, 3, 1, 2)
    labels = torch.tensor([3, -1])
    outputs = []
    for file in (plain, together):
        run = open_imported(tmp_path / file.stem, "givt", file, "--num-classes", "10")
        outputs.append(run.outputs(latents, labels=labels))
    torch.testing.assert_close(outputs[0], outputs[1], rtol=0, atol=0)
    # The adapter's outputs follow the density's parameters.
    expected = torch.from_numpy(adapter["y"]).flatten(1, 2)
    torch.testing.assert_close(outputs[0][..., -16:], expected, **TOLERANCE)
    back = run.objective.undo(run.inference.layers.modules[0], outputs[0][..., -16:])
    torch.testing.assert_close(back, latents, **TOLERANCE)


def test_vae_matches_released_code(tmp_path):
    values, run = golden("vae"), open_golden(tmp_path, "vae")
    image = torch.from_numpy(values["image01"])
    moments = torch.from_numpy(values["moments"]).permute(0, 3, 1, 2)
    torch.testing.assert_close(run.outputs(image), moments, **TOLERANCE)
    made = run.inference.predictions(run.objective.inputs_from(image))[1]
    expected = torch.from_numpy(values["decoder_output"]).permute(0, 3, 1, 2)
    torch.testing.assert_close(made, expected, **TOLERANCE)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([], "11 rows: pass --num-classes 10, with a null label, or 11, without"),
        (
            ["--num-classes", "7"],
            "--num-classes 7 does not fit the file: the table of labels has 11 rows",
        ),
    ],
)
def test_import_needs_the_number_of_classes(tmp_path, capsys, options, message):
    file = str(GOLDEN / "givt_causal.npz")
    assert main(["import", "givt", file, str(tmp_path / "run"), *options]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "decoder/LogitsDense/kernel",
            "part.npz: the weights have no decoder/LogitsDense/kernel, which a released GIVT has",
        ),
        ("decoder/EncDecBlock1/MLP/Dense_1/bias", "have no decoder/EncDecBlock1/MLP/Dense_1/bias"),
    ],
)
def test_missing_array_is_named(tmp_path, capsys, name, message):
    arrays = golden("givt_causal")
    del arrays[f"params/{name}"]
    file = tmp_path / "part.npz"
    np.savez(file, **arrays)
    assert main(["import", "givt", str(file), str(tmp_path / "run"), "--num-classes", "10"]) == 2
    assert message in capsys.readouterr().err


@pytest.fixture(scope="module")
def encoding(tmp_path_factory):
    """An objective that encodes images with a VAE in training, and that VAE."""
    folder = tmp_path_factory.mktemp("encoding")
    path, vae = folder / "config.yaml", import_golden(folder, "vae")
    path.write_text(
        tiny(
            "{name: givt, latent_channels: 8, downsampling: 4, num_classes: 2,"
            f" tokenizer: '{vae}'}}",
            data={"image_size": 32},
        )
    )
    config = load_config(path).config
    context = current_context() or open_context(read_launch({}), device="cpu")
    return OBJECTIVES["givt"](config, context), open_tokenizer(vae)


def test_images_are_encoded_on_the_fly(encoding):
    objective, vae = encoding
    images = torch.randint(256, (3, 32, 32, 3), dtype=torch.uint8)
    mean, scale = vae.encode(images).unbind(1)
    torch.testing.assert_close(objective.reads.of(images, None), mean)
    index = torch.arange(3)
    away = (objective.reads.of(images, index) - mean) / scale
    other = (objective.reads.of(images, index + 3) - mean) / scale
    assert not torch.equal(away, other)
    assert abs(float(away.std()) - 1.0) < 0.05
    assert objective.reads.to_images(mean).shape == images.shape


def test_imported_vae_takes_beta_from_the_command(tmp_path, capsys):
    run = import_file(tmp_path, "givt-vae", GOLDEN / "vae.npz", "--beta", "1e-5")
    assert read_config(Path(run))["objective"]["beta"] == 1e-5
    words = ["import", "givt-vae", str(GOLDEN / "vae.npz"), str(tmp_path / "other")]
    assert main([*words, "--beta", "-1"]) == 2
    assert "'-1' is not a number of 0 or more" in capsys.readouterr().err


def test_vae_beta_is_checked(encoding, tmp_path):
    objective, vae = encoding
    folder = write_latent_shards(
        tmp_path / "own", shape=(8, 8, 8), num_classes=2, num_images=4, identity=vae.identity()
    )

    def errors(beta):
        paper = objective.paper.model_copy(update={"tokenizer_beta": beta})
        config = objective.config.model_copy(update={"objective": paper})
        made = OBJECTIVES["givt"](config, current_context())
        return list(made.check_data(Manifest.read(folder)))

    assert errors(5e-5) == []
    with pytest.raises(UserError, match="is a VAE with beta 5e-05; this config needs beta 1e-05"):
        errors(1e-5)


def test_latent_shards_are_checked(encoding, tmp_path):
    objective, vae = encoding
    folder = write_latent_shards(
        tmp_path / "own", shape=(8, 8, 8), num_classes=2, num_images=4, identity=vae.identity()
    )
    assert list(objective.check_data(Manifest.read(folder))) == []
    folder = write_latent_shards(tmp_path / "other", shape=(8, 8, 8), num_classes=3, num_images=4)
    errors = " / ".join(objective.check_data(Manifest.read(folder)))
    assert "was made by the VAE 111111111111" in errors
    assert "has 3 classes; objective.num_classes is 2" in errors
    folder = write_latent_shards(tmp_path / "small", shape=(8, 4, 4), num_classes=0, num_images=4)
    errors = " / ".join(objective.check_data(Manifest.read(folder)))
    assert "holds latents of shape [8, 4, 4]" in errors
    assert "has no labels" in errors


def opener(paper):
    labels = paper.backbone.needs_labels
    return ShardOpener(paper.config, None, paper.check_data, labels, paper.classes_of)


@pytest.mark.once
def test_unlabelled_samples_need_a_null_label(encoding, tmp_path, monkeypatch):
    objective, vae = encoding
    folder = write_latent_shards(
        tmp_path / "some", shape=(8, 8, 8), num_classes=2, num_images=4, identity=vae.identity()
    )
    found = ShardDataset(folder)
    monkeypatch.setattr(ShardDataset, "num_unlabelled", 2)
    monkeypatch.setattr("megavis.data.loading.opening.ShardDataset", lambda *_, **__: found)
    arguments = ("data.train", str(folder), None)
    assert opener(objective).folder(*arguments) is found
    paper = objective.paper.model_copy(update={"label_dropout": 0.0})
    plain = OBJECTIVES["givt"](
        objective.config.model_copy(update={"objective": paper}), current_context()
    )
    with pytest.raises(UserError, match="holds 2 samples without a label, of 4 in all"):
        opener(plain).folder(*arguments)
