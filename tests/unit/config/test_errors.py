"""UserError: the keys that it blames, which the command line locates in the user's file."""

import ast
import pickle
import re
from pathlib import Path

import pytest

from megavis.config.errors import Remedy, UserError, blame
from megavis.config.schema import RunConfig
from megavis.config.yaml_tree import ConfigSource

SOURCE = ConfigSource("run.yaml", {"data": ("run.yaml", 3), "data.train": ("base.yaml", 7)})
BOTH = [("data.train", "is missing"), ("data.palette", "has 12 colours")]


def test_every_key_is_located():
    """A key that was not written is located at its section, or else at the file."""
    error = UserError.of([*BOTH, ("model.num_layers", "is 0"), (None, "no GPU is visible")])
    assert str(SOURCE.located(error)).splitlines() == [
        "base.yaml:7: data.train: is missing",
        "run.yaml:3: data.palette: has 12 colours",
        "run.yaml: model.num_layers: is 0",
        "no GPU is visible",
    ]


def test_a_place_is_added_once():
    place = r"^run\.yaml:3: data\.palette: has"
    with pytest.raises(UserError, match=place), SOURCE.locate(), SOURCE.locate():
        raise UserError("has 12 colours", key="data.palette")


def test_blame_keeps_the_keys_that_are_named():
    with pytest.raises(UserError) as caught, blame("data.train"), blame("data.validation"):
        raise UserError.of([(None, "holds 0 images"), ("data.palette", "has 12 colours")])
    assert caught.value.issues == (
        ("data.validation", "holds 0 images"),
        ("data.palette", "has 12 colours"),
    )


UNFIT = UserError("holds 0", key="data.train", remedy=Remedy("data.crop", "none"))


def test_a_remedy_is_the_end_of_a_message_and_a_part_of_the_error():
    assert str(UNFIT) == "data.train: holds 0; set data.crop to none"
    assert UNFIT.issues == (("data.train", "holds 0; set data.crop to none"),)
    assert (UNFIT.fault, UNFIT.remedy) == ("holds 0", Remedy("data.crop", "none"))
    with pytest.raises(UserError) as caught, blame("data.validation"):
        raise UserError("holds 0", remedy=UNFIT.remedy)
    assert str(SOURCE.located(caught.value)).endswith("holds 0; set data.crop to none")


@pytest.mark.parametrize(
    "error", [UserError("no GPU"), UserError("0", key="seed"), UNFIT, UserError.of(BOTH)]
)
def test_errors_reach_other_processes_whole(error):
    """The main process sends what it raised to the others."""
    received = pickle.loads(pickle.dumps(error))
    assert (str(received), vars(received)) == (str(error), vars(error))


def test_keys_are_not_hidden_in_texts():
    """The command line adds file and line only to a key that is passed as `key`."""
    key = re.compile(rf"({'|'.join(RunConfig.model_fields)})(: |\.\w)")
    hidden = []
    for path in (path for name in ("megavis", "data_tools") for path in Path(name).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "UserError":
                text = ast.unparse(node.args[0]).removeprefix("f")[1:]
                hidden += [f"{path}:{node.lineno}"] if key.match(text) else []
    assert not hidden
