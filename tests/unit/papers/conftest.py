"""Fixtures of the papers' tests."""

import pytest
from compositions import config


@pytest.fixture
def build_composition(build_paper):
    """Build a composition from its sections."""

    def build(*words, more=()):
        objective = f"{{name: compose, {', '.join(words)}}}"
        return build_paper(config(objective), *more, std=0.3)

    return build
