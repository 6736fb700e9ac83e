"""What headers of presets run for a table or figure: the paper's data, classifier and models."""

import importlib
import shlex
from pathlib import Path

import pytest

from megavis.cli import read_arguments
from megavis.commands.probe import read_data_sets
from megavis.config.load import load_config

pytestmark = pytest.mark.once

ROOT = Path(__file__).parents[2]
# iGPT, section 3.1: "we split off 10% of the provided training set".
FITTED = {"cifar10": 45_000, "cifar100": 45_000, "stl10": 4_500}


@pytest.fixture(scope="module")
def claims():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "docs/scripts"))
        return importlib.import_module("paper_claims").read_claims()


def commands_of(claims, paper, item):
    """Return the parsed commands that a paper's presets claim for a table or figure."""
    found = [claim.command for claim in claims if (claim.paper, claim.item) == (paper, item)]
    return [read_arguments(shlex.split(command)[1:]) for command in found if command]


@pytest.mark.parametrize(
    ("item", "data_sets", "runs"),
    [
        ("Table 1", ["cifar10", "cifar100", "stl10"], 3),
        ("Figure 2", ["cifar10", "cifar100", "stl10"], 3),
        ("Figure 3", ["cifar10"], 1),
        ("Figure 4", ["cifar10"], 2),
    ],
)
def test_igpt_fits_the_papers_classifier_to_all_images(claims, item, data_sets, runs):
    """Section 3.4: scikit-learn's L-BFGS; section 3.1: a tenth selects, the test set is scored."""
    commands = commands_of(claims, "igpt", item)
    assert len(commands) == runs
    assert sorted({Path(args.train).parent.name for args in commands}) == data_sets
    for args in commands:
        folder = Path(args.train).parent
        assert args.classifier == "plain"
        assert (args.train, args.selection) == (f"{folder}/train", f"{folder}/validation")
        assert (args.validation, args.validation_images) == (f"{folder}/test", None)
        assert args.train_images == FITTED[folder.name]
    names = [args.name for args in commands if "name" in args]
    assert len(set(names)) == len(names), "one would overwrite another"


def test_igpt_table_4(claims):
    """ "We sample 5 random subsets and report mean and standard deviation" (section 4.7)."""
    (args,) = commands_of(claims, "igpt", "Table 4")
    assert (args.classifier, args.images_per_class, args.draws) == ("plain", [4, 25, 400], 5)
    assert list(read_data_sets(args.data_sets)) == ["cifar10"]


def test_igpt_figure_3_has_the_three_published_sizes(claims):
    (args,) = commands_of(claims, "igpt", "Figure 3")
    assert [path.name for path in args.run_folders] == ["igpt_s_32", "igpt_m_32", "igpt_l_32"]
    # The loss is on ImageNet, the run's own data.
    assert args.loss_images is None


def test_igpt_figure_4_compares_both_objectives_four_times(claims):
    """Probe and fine-tuning, on CIFAR-10 and on ImageNet; BERT by the vote of five masks."""
    trained = {c.config.name for c in claims if (c.paper, c.item) == ("igpt", "Figure 4")}
    ways = ["linear", "finetune_cifar10", "finetune_imagenet"]
    models = ["igpt_l_32", "igpt_l_32_bert"]
    assert trained == {*models, *(f"{model}_{way}" for model in models for way in ways)}
    probes = {args.run_folder.name: args for args in commands_of(claims, "igpt", "Figure 4")}
    assert probes["igpt_l_32_bert"].masks == 5
    assert probes["igpt_l_32"].masks is None


def runs_of(claims, paper, item, row=0):
    """Return the configs that a page names for an item or a row, by run name."""
    found = [c for c in claims if (c.paper, c.item, c.row) == (paper, item, row) and not c.command]
    return {claim.config.name: claim.config for claim in found}


def test_mp3_figure_8_is_of_one_model_without_masking(claims):
    """ "Both fine tuned models are tuned from the same MP3 model (left), which was trained with
    masking ratio η = 0", with and without positional encoding."""
    drawn = [args.run_folder.name for args in commands_of(claims, "mp3", "Figure 8")]
    runs = runs_of(claims, "mp3", "Figure 8")
    assert sorted(drawn) == sorted(runs)
    assert {config.objective.mask_ratio for config in runs.values()} == {0.0}
    tuned = [config for config in runs.values() if config.finetune]
    assert {config.finetune.from_run for config in tuned} == {"runs/mp3_vit_b_imagenet_0"}
    assert sorted(config.model.positions for config in tuned) == ["learned", "none"]
    assert len(runs) == 3


def test_mp3_figure_11_has_four_models(claims):
    """MP3 pre-trained, fine-tuned with and without positions, and the supervised baseline."""
    drawn = {args.run_folder.name for args in commands_of(claims, "mp3", "Figure 11")}
    base = "mp3_vit_b_imagenet"
    assert drawn == {base, f"{base}_finetune", f"{base}_finetune_none", f"{base}_scratch"}


def test_mp3_figure_9_varies_the_mask_ratio(claims):
    """ "The pretraining η and the target layer are varied", on all of ImageNet."""
    commands = commands_of(claims, "mp3", "Figure 9")
    assert {args.run_folder.name for args in commands} == {
        "mp3_vit_b_imagenet",
        *runs_of(claims, "mp3", "Figure 9"),
    }
    ratios = {c.objective.mask_ratio for c in runs_of(claims, "mp3", "Figure 9").values()}
    assert ratios == {0.0, 0.5}  # and the preset's 0.75
    assert {(args.train_images, args.num_images) for args in commands} == {(1_281_167, 50_000)}


@pytest.mark.parametrize(("row", "epochs"), [(11, 200), (12, 1600)])
def test_mp3_table_4_cites_maes_figure_of_plain_pixels(claims, row, epochs):
    """MAE's Figure 7, whose default predicts pixels that are not normalised; 50 epochs tune."""
    before, tuned = runs_of(claims, "mp3", "Table 4", row).values()
    assert not before.objective.normalize_targets
    assert (before.model.num_layers, before.model.hidden_size) == (24, 1024)
    assert before.training.steps == -(-epochs * 1_281_167 // before.training.batch_size)
    assert tuned.finetune.from_run == str(before.folder)
    assert not tuned.objective.normalize_targets
    # Released code: 0.2 with normalised targets; the paper's Table 9: 0.1.
    assert (tuned.finetune.drop_path, tuned.finetune.layer_decay) == (0.1, 0.75)
    assert tuned.training.steps == -(-50 * 1_281_167 // tuned.training.batch_size)


def test_mp3_table_3_trains_mae_on_the_same_images(claims):
    """Section 4.2: the authors ran MAE, with the same number of epochs."""
    runs = runs_of(claims, "mp3", "Table 3", 6)
    for stem in ("vit_s_cifar100", "vit_b_tiny_imagenet"):
        mae, tuned = runs[f"mae_{stem}"], runs[f"mae_{stem}_finetune"]
        mp3 = load_config(ROOT / "yaml_configs" / "mp3" / f"{stem}.yaml").config
        mp3_tuned = load_config(ROOT / "yaml_configs" / "mp3" / f"{stem}_finetune.yaml").config
        for key in ("train", "validation", "num_images", "image_size"):
            if key in type(mae.data).model_fields:
                assert getattr(mae.data, key) == getattr(mp3.data, key)
                assert getattr(tuned.data, key) == getattr(mp3_tuned.data, key)
        assert mae.objective.patch_size == mp3.objective.patch_size
        assert mae.training.steps == mp3.training.steps
        assert tuned.training.steps == mp3_tuned.training.steps
        shape = ("num_layers", "hidden_size", "num_attention_heads", "head_size")
        for key in shape:
            assert getattr(mae.model, key) == getattr(mp3.model, key) == getattr(tuned.model, key)
        assert tuned.finetune.test == mp3_tuned.finetune.test
        assert tuned.finetune.num_classes == mp3_tuned.finetune.num_classes
        assert tuned.finetune.from_run == str(mae.folder)


def test_mp3_section_4_2_3_averages_the_two_runs_of_table_4(claims):
    (args,) = commands_of(claims, "mp3", "Section 4.2.3")
    tuned = {**runs_of(claims, "mp3", "Table 4", 8), **runs_of(claims, "mp3", "Table 4", 7)}
    assert {path.name for path in args.run_folders} <= set(tuned)
    assert {tuned[path.name].objective.name for path in args.run_folders} == {"mp3", "mae"}
