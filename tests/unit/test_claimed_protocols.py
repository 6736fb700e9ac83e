"""What headers of presets run for a table or figure: the paper's data, classifier and models."""

import importlib
import shlex
from pathlib import Path

import pytest

from megavis.cli import read_arguments
from megavis.commands.probe import read_data_sets

pytestmark = pytest.mark.once

ROOT = Path(__file__).parents[2]
# iGPT, section 3.1: "we split off 10% of the provided training set".
FITTED = {"cifar10": 45_000, "cifar100": 45_000, "stl10": 4_500}


@pytest.fixture(scope="module")
def claims():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "launch"))
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
    trained = {c.path.stem for c in claims if (c.paper, c.item) == ("igpt", "Figure 4")}
    ways = ["linear", "finetune_cifar10", "finetune_imagenet"]
    models = ["l_32", "l_32_bert"]
    assert trained == {*models, *(f"{model}_{way}" for model in models for way in ways)}
    probes = {args.run_folder.name: args for args in commands_of(claims, "igpt", "Figure 4")}
    assert probes["igpt_l_32_bert"].masks == 5
    assert probes["igpt_l_32"].masks is None
