"""Fixtures of the comparisons of presets with the papers' protocols."""

import pytest
from protocols import Protocols


@pytest.fixture(scope="module")
def protocols(request):
    """The claims on rows of the module's `PAPER`."""
    return Protocols(request.module.PAPER)


@pytest.fixture(scope="module")
def rows(protocols):
    """Chains of configs by row."""
    return protocols.rows()


@pytest.fixture(scope="module")
def commands(protocols):
    """Parsed commands by row."""
    return protocols.commands()
