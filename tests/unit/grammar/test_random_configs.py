"""Random configs of every paper: refusals name the paper's own keys, and the rest is built."""

import random
import subprocess
import sys

import pytest
from random_configs import check_messages, checked, drawn, take_steps_of_accepted

from megavis.config.papers import PAPER_CONFIGS
from megavis.grammar.paper import PaperConfig

pytestmark = pytest.mark.once
PAPERS = [name for name, keys in PAPER_CONFIGS.items() if issubclass(keys, PaperConfig)]
NAMED = [name for name in PAPERS if name != "compose"]
"""Of compose's random words hardly any fit each other: `test_advice.py` goes on until they do."""


@pytest.mark.parametrize("name", PAPERS)
def test_every_message_names_keys_of_the_paper(name):
    counts = check_messages(name, 400)
    assert counts[False] > 0
    assert counts[True] > 0 or name not in NAMED


@pytest.mark.parametrize("name", NAMED)
def test_what_is_accepted_builds_and_takes_a_step(build_paper, name):
    trained = take_steps_of_accepted(build_paper, name, 3, seed=1)
    assert trained > 0 or name == "givt_encoder_decoder"  # Only a VAE encodes its data.


def test_rows_that_a_layout_does_not_divide_are_changed_by_keys_of_the_paper():
    """GIVT's start token is one; GVP has a key for the number of its condition tokens."""
    messages = {}
    for objective in (
        {"name": "givt_maskgit", "num_classes": 0, "downsampling": 4},
        {"name": "gvp", "patch_size": 4, "num_groups": 3},
        {"name": "mae", "patch_size": 4},
    ):
        tree = {**drawn("igpt", random.Random(0)), "data": {"train": "shards", "image_size": 16}}
        tree |= {"objective": objective, "parallel": {"context_parallel_size": 2}}
        tree["model"] |= {"hidden_size": 16, "positions": None}
        _, ((key, text),) = checked(tree)
        assert key == "parallel.context_parallel_size"
        messages[objective["name"]] = text.partition("; ")[2]
    assert messages == {
        "givt_maskgit": "set it to 1",
        "gvp": "change objective.num_condition_tokens, or set it to 1",
        "mae": "change objective.mask_ratio or objective.class_token, or set it to 1",
    }


def test_checks_import_no_torch():
    code = "import sys, megavis.grammar.checks, megavis.grammar.compose, megavis.papers.givt.config"
    code += "; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
