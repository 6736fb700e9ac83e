"""20,000 random configs of every paper: no message names a key that the config does not have."""

import pytest
from random_configs import check_messages

from megavis.config.papers import PAPER_CONFIGS
from megavis.grammar.paper import PaperConfig

PAPERS = [name for name, keys in PAPER_CONFIGS.items() if issubclass(keys, PaperConfig)]


@pytest.mark.parametrize("name", PAPERS)
def test_messages(name):
    counts = check_messages(name, 20_000, seed=1)
    print(f"{name}: {counts[True]} accepted, {counts[False]} refused")
    assert counts[False] > 0
