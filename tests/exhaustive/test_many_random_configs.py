"""20,000 random configs of every paper: no message names a key that the config does not have.

Some of those accepted are built and trained by a step.
"""

import pytest
from random_configs import check_messages, take_steps_of_accepted

from megavis.config.papers import PAPER_CONFIGS
from megavis.grammar.paper import PaperConfig

PAPERS = [name for name, keys in PAPER_CONFIGS.items() if issubclass(keys, PaperConfig)]


@pytest.mark.parametrize("name", PAPERS)
def test_messages(name):
    counts = check_messages(name, 20_000, seed=1)
    print(f"{name}: {counts[True]} accepted, {counts[False]} refused")
    assert counts[False] > 0


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", PAPERS)
def test_accepted(build_paper, name):
    count = 20 if name == "compose" else 200
    trained = take_steps_of_accepted(build_paper, name, count, seed=2)
    print(f"{name}: {count} accepted configs built, {trained} of them trained by a step")
    assert trained > 0 or name == "givt_encoder_decoder"  # Only a VAE encodes its data.
