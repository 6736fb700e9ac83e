"""`megavis plan`, run as in their header, still recommends the shipped layouts."""

import re
import shlex
from pathlib import Path

import pytest

from megavis.cli import main
from megavis.config.load import load_config

pytestmark = pytest.mark.once

ROOT = Path(__file__).parents[3]
COMMAND = re.compile(r"^#   (megavis plan .*)$", re.MULTILINE)
SHIPPED = [
    path
    for path in sorted((ROOT / "yaml_configs").glob("*/*.yaml"))
    if COMMAND.search(path.read_text())
]
# The fastest to plan; one per paper.
CHOSEN = ["xl_64_4x8_h100", "causal_large_4x8_h100", "vit_h14_mse_1x8_h100"]


def test_shipped_layouts_are_found():
    assert len(SHIPPED) == 9
    assert {path.stem for path in SHIPPED} > set(CHOSEN)


@pytest.mark.parametrize("name", CHOSEN)
def test_plan_recommends_the_shipped_layout(name, tmp_path, capsys):
    (path,) = (path for path in SHIPPED if path.stem == name)
    _, *words = shlex.split(COMMAND.search(path.read_text()).group(1))
    written = tmp_path / path.parent.name / path.name
    written.parent.mkdir()
    words[words.index("--write") + 1] = str(written)
    assert main(words) == 0
    shipped, again = (load_config(file).config for file in (path, written))
    assert again == shipped
    # The header's figures must match as well.
    assert written.read_text().splitlines()[2:5] == path.read_text().splitlines()[2:5]
    assert "Recommended" in capsys.readouterr().out
