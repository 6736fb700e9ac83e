"""What the documents say of the code is so; the printed paper runs in tests/distributed."""

import re
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[2] / "docs"


def blocks(language):
    text = (DOCS / "add-a-paper.md").read_text(encoding="utf-8")
    return re.findall(rf"^```{language}\n(.*?)^```$", text, flags=re.MULTILINE | re.DOTALL)


def test_the_printed_line_is_the_code_s_own_list():
    source = (DOCS.parent / "megavis/objectives/__init__.py").read_text(encoding="utf-8")
    line = blocks("python")[1].replace('    "restoration": Restoration,\n', "")
    assert line.strip() in source


@pytest.mark.parametrize("path", sorted([*DOCS.glob("*.md"), *DOCS.parent.glob("*.md")]), ids=str)
def test_links_and_named_files_exist(path):
    """Whatever a document points at inside the checkout is there."""
    text = path.read_text(encoding="utf-8")
    targets = re.findall(r"\]\((?!https?:|#)([^)#]+)", text)
    missing = [target for target in targets if not (path.parent / target).exists()]
    named = re.findall(
        r"`((?:megavis|docs|launch|tests|yaml_configs|data_tools)/[\w./-]+\.\w+)`", text
    )
    missing += [name for name in named if not (DOCS.parent / name).exists()]
    assert not set(missing) - {"megavis/objectives/restoration.py"}
