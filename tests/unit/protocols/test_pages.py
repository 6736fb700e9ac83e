"""docs/papers has an item for every table and figure, and every paper protocols for its rows."""

import re
from pathlib import Path

import pytest
import yaml
from protocols import ROOT

from megavis.reports.published import published_papers

pytestmark = pytest.mark.once

# Counted in the papers, appendices included; of AIM as the ICML version numbers them. RandAR's text
# was not at hand: its page has a table of the released code and one of a later paper.
TABLES = {
    "igpt": range(1, 6),
    "givt": range(1, 9),
    "darl": range(1, 17),
    "gvp": range(1, 12),
    "mp3": range(1, 8),
    # Table 1 has six parts.
    "mae": ["1a", "1b", "1c", "1d", "1e", "1f", *range(2, 14)],
    # Table 3 has six parts and Table 4 two.
    "aim": [1, 2, *(f"3{part}" for part in "abcdef"), "4a", "4b", *range(5, 12)],
    "rar": range(1, 7),
    "randar": ["of the released code", "2 of ARPG"],
    "mar": range(1, 7),
}
FIGURES = {
    **{"igpt": 4, "givt": 21, "darl": 15, "gvp": 2, "mp3": 15, "mae": 11},
    **{"aim": 10, "rar": 9, "randar": 0, "mar": 8},
}
# Printed lines of results, by table, counted in the papers; a table of two directions by its longer
# one (DARL's Table 4 has a column for each data set, its Table 16 one for each model).
LINES = {
    "igpt": {1: 8, 2: 11, 3: 8, 4: 6},
    "givt": {1: 19},
    "darl": {1: 7, 3: 2, 4: 22, 5: 7, 6: 2, 7: 3, 14: 2, 15: 5, 16: 6},
    "gvp": {1: 13, 2: 4, 3: 2, 4: 11, 5: 6, 6: 5, 7: 3, 8: 4, 9: 3, 10: 4, 11: 3},
    "mp3": {3: 9, 4: 13, 5: 3, 6: 1, 7: 2},
    "mae": {
        **{"1a": 5, "1b": 5, "1c": 2, "1d": 4, "1e": 4, "1f": 4},
        **{2: 6, 3: 5, 4: 4, 5: 4, 6: 5, 7: 3, 12: 6, 13: 8},
    },
}
# Tables of settings, sizes or costs; and those whose numbers are not legible in the text at hand.
SETTINGS = {
    "igpt": {5},
    "givt": {5, 6, 8},
    "darl": {8, 9, 10, 11, 12, 13},
    "gvp": set(),
    "mp3": {1, 2},
    "mae": {8, 9, 10, 11},
}
ILLEGIBLE = {"givt": {2, 3, 4, 7}, "darl": {2}}


def items_of(paper):
    """Return the items of a page by name."""
    tree = yaml.safe_load((ROOT / "docs" / "papers" / f"{paper}.yaml").read_text(encoding="utf-8"))
    return {item["item"]: item for item in tree}


@pytest.mark.parametrize("paper", LINES)
def test_tables_have_a_row_for_every_line_of_results(paper):
    """Every other table is one of settings, or gives the numbers that the text has in words."""
    published = {table.table: table for table in published_papers()[paper].tables}
    for number, lines in LINES[paper].items():
        assert len(published[f"Table {number}"].rows) == lines, f"Table {number}"
    illegible = ILLEGIBLE.get(paper, set())
    assert {*LINES[paper], *SETTINGS[paper], *illegible} == {*TABLES[paper]}
    items = items_of(paper)
    for number in illegible:
        assert re.search(r"not available|not listed|text at hand", str(items[f"Table {number}"]))


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
