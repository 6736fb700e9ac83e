"""What the tests of papers share."""

import pytest
from compositions import config


@pytest.fixture
def build_composition(build_paper):
    """Build a composition of these words."""

    def build(*words, more=()):
        objective = f"{{name: compose, {', '.join(words)}}}"
        return build_paper(config(objective), *more, std=0.3)

    return build
