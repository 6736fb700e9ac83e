"""Fixtures of the comparisons of presets with the papers' protocols."""

import pytest
from protocols import Protocols


@pytest.fixture(scope="module")
def rows(request):
    """The chains of configs by row of the module's `PAPER`."""
    with pytest.MonkeyPatch.context() as patch:
        yield Protocols(patch, request.module.PAPER).rows()
