"""`megavis plan`, run as in their header, still recommends the shipped layouts."""

from pathlib import Path

import pytest

from docs.scripts.plans import command_of, planned, with_table
from megavis.cli import main
from megavis.config.load import load_config

pytestmark = pytest.mark.once

ROOT = Path(__file__).parents[3]
SHIPPED = planned()
# The fastest to plan; one per paper.
CHOSEN = ["xl_64_4x8_h100", "causal_large_4x8_h100", "vit_h14_diff_1x8_h100"]


def test_shipped_layouts_are_found():
    assert len(SHIPPED) == 8
    assert {path.stem for path in SHIPPED} > set(CHOSEN)


def test_table_is_written_from_the_files():
    page = (ROOT / "docs/scaling.md").read_text(encoding="utf-8")
    assert with_table(page) == page, "run python docs/scripts/plans.py"


def test_another_micro_batch_changes_the_table():
    page = (ROOT / "docs/scaling.md").read_text(encoding="utf-8")
    row = next(line for line in page.splitlines() if "causal_large_1x8_h100" in line)
    cells = row.split(" | ")
    other = page.replace(row, " | ".join([*cells[:3], "7", *cells[4:]]))
    assert other != page
    assert with_table(other) == page


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_header_claims_no_measurement(path):
    head = path.read_text(encoding="utf-8").partition("based_on:")[0]
    assert "# which estimates, without having run it on a GPU:" in head
    assert "#   host: " in head
    assert "MFU" not in head


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_small_models_are_not_split_by_zero_3(path):
    """iGPT-XL has 6.8 B parameters; GIVT-L 1.7 and ViT-H 0.6."""
    config = load_config(path).config
    assert config.parallel.zero_stage < 3 or config.model.hidden_size == 3072
    assert config.parallel.pipeline_model_parallel_size == 1 or config.parallel.zero_stage == 1


def test_layouts_named_by_the_mission_exist():
    """iGPT-XL on 64, 128 and 256 GPUs, GIVT-L and ViT-H/14 on 8 and 32."""
    wanted = {f"xl_64_{nodes}x8_h100" for nodes in (8, 16, 32)}
    wanted |= {
        f"{name}_{nodes}x8_h100" for nodes in (1, 4) for name in ("causal_large", "vit_h14_diff")
    }
    assert wanted <= {path.stem for path in SHIPPED}


def figures(path):
    """Return the header without the first two lines, which name the file."""
    lines = path.read_text(encoding="utf-8").splitlines()[2:]
    return [line for line in lines if line.startswith(("#   ", "# W", "# w"))]


@pytest.mark.parametrize("name", CHOSEN)
def test_plan_recommends_the_shipped_layout(name, tmp_path, capsys):
    (path,) = (path for path in SHIPPED if path.stem == name)
    words = command_of(path)
    written = tmp_path / path.parent.name / path.name
    written.parent.mkdir()
    words[words.index("--write") + 1] = str(written)
    assert main(words) == 0
    shipped, again = (load_config(file).config for file in (path, written))
    assert again == shipped
    # The header's figures must match as well.
    assert figures(written) == figures(path)
    assert "Recommended" in capsys.readouterr().out
