"""What the headers of the presets say to run: every command is valid, every override is accepted.

The commands below `Gives:` are in tests/unit/protocols; here they are only parsed.
"""

import importlib
import re
import shlex
from pathlib import Path

import pytest
from folded_back import folded_runs, retraining
from preset_headers import (
    CONFIGS,
    ROOT,
    commands_of,
    header_of,
    megavis_words,
    overrides_in_prose,
    prose_of,
)

from data_tools.__main__ import build_parser
from megavis.cli import COMMANDS, read_arguments
from megavis.commands.sample import check_together
from megavis.config.load import load_config
from megavis.grammar.paper import PaperConfig

pytestmark = pytest.mark.once

COMMANDS_BY_PATH = {path: list(commands_of(path)) for path in CONFIGS}
EVERY = [command for commands in COMMANDS_BY_PATH.values() for command in commands]
DATA_TOOLS = build_parser()
# "Generative Pretraining from Pixels", section 3.1: "Once optimal hyperparameters are found, we
# fold our experimental validation set back into the training set, retrain the model, and report
# numbers on the respective test set." DARL, appendix A.4, does the same for VTAB.
ALL_IMAGES = {
    # ImageNet's 1,281,167 training images, of which imagenet_96 holds 4 % out.
    "shards/imagenet_96": ("shards/imagenet_jpeg/train", "shards/imagenet_jpeg/validation"),
    "shards/cifar10_32": ("shards/cifar10_32/both", "shards/cifar10_32/test"),
    "shards/cifar100_32": ("shards/cifar100_32/both", "shards/cifar100_32/test"),
    "shards/cifar100": ("shards/cifar100/both", "shards/cifar100/test"),
}
# What the first runs found; in the headers placeholders.
CHOSEN = {"optimizer.learning_rate", "finetune.layer", "training.steps", "training.validate_every"}


@pytest.mark.parametrize("command", EVERY, ids=str)
def test_commands_have_valid_options(command):
    words = command.words
    if (given := megavis_words(words)) is not None:
        assert read_arguments(given).run
    elif words[:3] == ["python", "-m", "data_tools"]:
        assert DATA_TOOLS.parse_args(words[3:]).run
    elif words[0] == "make":
        makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
        assert re.search(rf"^{words[1]}:", makefile, re.MULTILINE)
    for word in words:
        if word.startswith("launch/"):
            assert (ROOT / word).exists()


SAMPLES = [each for each in EVERY if each.words[:2] == ["megavis", "sample"]]


@pytest.fixture(scope="module")
def runs():
    """Configs by run folder."""
    configs = (load_config(path).config for path in CONFIGS)
    return {str(config.folder): config for config in configs}


@pytest.mark.parametrize("command", SAMPLES, ids=str)
def test_options_of_sampling_apply_together(command, runs):
    args = read_arguments(command.words[1:])
    config = runs[str(args.run_folder)]
    if not isinstance(config.objective, PaperConfig):
        return  # reconstructs images
    grammar = config.objective.grammar(config)
    continues = grammar.schedule.kind == "groups"
    check_together(args, reads_images=continues or grammar.memory is not None)
    assert not (continues and args.classes)


@pytest.mark.parametrize("command", [each for each in EVERY if each.loads], ids=str)
def test_commands_have_accepted_configs(command):
    if "--write" in command.words:  # of another config, from which this one was made
        assert Path(command.words[command.words.index("--write") + 1]).name == command.path.name
        return
    given = megavis_words(command.words)
    fits = {"finetune": bool, "search-lr": bool}.get(given[0], lambda _: True)
    assert fits(command.config.finetune)


def test_demos_are_made_by_name():
    script = (ROOT / "launch/demo.sh").read_text(encoding="utf-8")
    named = {name for path in CONFIGS for name in re.findall(r"PAPER=([\w-]+)", header_of(path))}
    assert len(named) > 5
    assert not [name for name in named if not re.search(rf"^{name}\(\) ", script, re.MULTILINE)]


def test_commands_read_runs_that_others_write():
    """A run of a shipped config, one that a page of docs/papers names, or one of the header."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "docs/scripts"))
        claims = importlib.import_module("paper_claims")
    known = {*claims.known_runs()}
    known |= {str(claim.config.folder) for claim in claims.read_claims() if claim.words}
    known |= {
        str(each.config.folder) for each in EVERY if each.loads and "--write" not in each.words
    }
    known |= {each.words[-1] for each in EVERY if each.words[:2] == ["megavis", "import"]}
    read = [
        (word, str(command))
        for command in EVERY
        for word in re.findall(r"\bruns/[\w.-]+", command.text)
    ]
    assert len(read) > 30
    assert not [each for each in read if each[0] not in known]


def test_claimed_commands_have_valid_options():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "docs/scripts"))
        claims = importlib.import_module("paper_claims").read_claims()
    commands = [shlex.split(claim.command) for claim in claims if claim.command]
    given = [words for each in commands if (words := megavis_words(each)) is not None]
    assert len(given) > 50
    assert all(read_arguments(words).run for words in given)


@pytest.mark.parametrize("path", [path for path in CONFIGS if [*overrides_in_prose(path)]], ids=str)
def test_overrides_in_prose_are_accepted(path):
    for words in overrides_in_prose(path):
        load_config(path, words)


def test_commands_in_prose_exist():
    """A command with a config has a line of its own, where the tests above find it."""
    for path in CONFIGS:
        text = prose_of(path)
        assert not re.findall(r"\bmegavis [a-z-]+ \S+\.yaml", text), path
        in_backticks = re.findall(r"`megavis ([a-z-]+)", text)
        assert not [name for name in in_backticks if name not in COMMANDS], path


def flat(config):
    """Return a config's values by dotted key."""
    tree = config.model_dump()
    return {
        f"{section}.{key}" if isinstance(values, dict) else section: value
        for section, values in tree.items()
        for key, value in (values.items() if isinstance(values, dict) else [(section, values)])
    }


FOLDED = [*folded_runs()]
every_folded = pytest.mark.parametrize("run", FOLDED, ids=lambda run: run.config.name)


@every_folded
def test_held_out_images_are_folded_back(run):
    before, (after, words) = run.config, retraining(run)
    folder = Path(before.data.validation).parent
    whole, test = ALL_IMAGES[str(folder)]
    old, new = ([source.path for source in each.data.train_sources] for each in (before, after))
    assert new == [whole if path == f"{folder}/train" else path for path in old]
    assert whole in new
    # A web image has no part that was held out, and keeps its crop.
    assert [source.crop for source in after.data.train_sources] == [
        source.crop for source in before.data.train_sources
    ]
    if whole.endswith("/both"):
        merges = [each.words[4:] for each in COMMANDS_BY_PATH[run.path] if "merge" in each.words]
        assert [f"{folder}/train", f"{folder}/validation", "--out", whole] in merges
    else:
        assert "data.num_images=1281167" in words
    if before.finetune is None:
        assert after.data.validation == test
        # One epoch of all images (Table 5).
        assert after.schedule.warmup_steps == -(-1_281_167 // after.training.batch_size)
    else:
        # The held-out images are now trained on, and the only validation is the last: it chooses
        # nothing, and the test images, never trained on, count.
        assert after.training.validate_every == after.training.steps
        assert after.finetune.patience == 0
        assert after.finetune.test == before.finetune.test == test


@every_folded
def test_folding_back_changes_nothing_else(run):
    before, after = flat(run.config), flat(retraining(run)[0])
    changed = {key for key in {*before, *after} if before.get(key) != after.get(key)}
    allowed = {"name", "data.train", "data.num_images", "data.validation", "schedule.warmup_steps"}
    assert changed - CHOSEN <= allowed | {"finetune.from_run", "finetune.patience"}
    assert after["name"] != before["name"]


def test_retrained_classifiers_start_from_retrained_networks():
    networks = {
        str(run.config.folder): str(retraining(run)[0].folder)
        for run in FOLDED
        if not run.config.finetune
    }
    for run in FOLDED:
        if run.config.finetune and run.path.parent.name == "igpt":
            before, after = (each.finetune.from_run for each in (run.config, retraining(run)[0]))
            assert after == (before and networks[before])
