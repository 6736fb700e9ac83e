"""docs/papers has an item for every table and figure, and every paper protocols for its rows."""

from pathlib import Path

import pytest
import yaml
from protocols import ROOT

pytestmark = pytest.mark.once

# Counted in the papers, appendices included; of AIM without appendices B to D.
TABLES = {
    "igpt": range(1, 6),
    "givt": range(1, 9),
    "darl": range(1, 17),
    "gvp": range(1, 12),
    "mp3": range(1, 8),
    # Table 1 has six parts.
    "mae": ["1a", "1b", "1c", "1d", "1e", "1f", *range(2, 14)],
    # Table 3 has six parts and Table 4 two.
    "aim": [1, 2, *(f"3{part}" for part in "abcdef"), "4a", "4b", *range(5, 9)],
    "rar": range(1, 7),
    "mar": range(1, 7),
}
FIGURES = {
    "igpt": 4, "givt": 21, "darl": 15, "gvp": 2, "mp3": 15, "mae": 11, "aim": 7, "rar": 9, "mar": 8
}  # fmt: skip


@pytest.mark.parametrize("paper", TABLES)
def test_page_has_every_table_and_figure(paper):
    tree = yaml.safe_load((ROOT / "docs" / "papers" / f"{paper}.yaml").read_text(encoding="utf-8"))
    names = [item["item"] for item in tree]
    assert len(set(names)) == len(names)
    assert {name for name in names if name.startswith(("Table", "Figure"))} == {
        *(f"Table {number}" for number in TABLES[paper]),
        *(f"Figure {number}" for number in range(1, FIGURES[paper] + 1)),
    }


@pytest.mark.parametrize("paper", TABLES)
def test_paper_has_protocols_for_its_rows(paper):
    """A page's claims are compared with the paper's words, not only listed."""
    text = (Path(__file__).parent / f"test_{paper}_rows.py").read_text(encoding="utf-8")
    assert f'PAPER = "{paper}"\n' in text
    assert "def test_every_claimed_row_has_a_protocol(rows):" in text
    assert "def test_row_trains_as_the_paper_says(rows, row):" in text


def test_every_page_is_of_a_paper_with_protocols():
    pages = {path.stem for path in (ROOT / "docs" / "papers").glob("*.yaml")}
    assert pages == set(TABLES)
