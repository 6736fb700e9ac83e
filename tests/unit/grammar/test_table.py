"""One vocabulary: kinds, classes and documents use the same words."""

import importlib
import re
from pathlib import Path

import pytest

from megavis.composition import asking, build, condition, encoded_image, encoded_tokens, tokens
from megavis.densities import diffusion, gaussians, squared_error
from megavis.grammar.grammar import Words
from megavis.model import adapter

pytestmark = pytest.mark.once
ROOT = Path(__file__).parents[3]
PLACES = (
    *(tokens, encoded_tokens, asking, build, condition, encoded_image, adapter),
    *(diffusion, gaussians, squared_error),
)


@pytest.fixture(scope="module")
def tables():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "docs/scripts"))
        yield importlib.import_module("grammar_tables")


@pytest.mark.parametrize("name", ["docs/compose.md"])
def test_documents_have_the_table(tables, name):
    assert name in tables.DOCUMENTS
    text = (ROOT / name).read_text(encoding="utf-8")
    assert text == tables.with_table(text), "run python docs/scripts/grammar_tables.py"
    assert "| `asks` | `in_context` |" in text


@pytest.mark.parametrize("word", [*Words.model_fields])
def test_kinds_are_names_of_classes(tables, word):
    for section in tables.sections_of(Words.model_fields[word].annotation):
        if word == "weights":
            continue
        name, kind = section.__name__, section.model_fields["kind"].default
        assert re.sub(r"(?<!^)(?=[A-Z])", "_", name).lower() == kind
        # Learned tokens are parts of the first layer alone.
        assert name == "LearnedTokens" or any(hasattr(place, name) for place in PLACES), name
