"""Random configs of every paper: refusals name the paper's own keys, and the rest is built."""

import random
import subprocess
import sys

import pytest
import torch
import yaml
from random_configs import check_messages, checked, drawn

from megavis.config.papers import PAPER_CONFIGS
from megavis.grammar.paper import PaperConfig

pytestmark = pytest.mark.once
PAPERS = [name for name, keys in PAPER_CONFIGS.items() if issubclass(keys, PaperConfig)]
NAMED = [name for name in PAPERS if name != "compose"]
"""Of compose's random words hardly any fit each other: `test_advice.py` goes on until they do."""


@pytest.mark.parametrize("name", PAPERS)
def test_every_message_names_keys_of_the_paper(name):
    counts = check_messages(name, 200)
    assert counts[False] > 0
    assert counts[True] > 0 or name not in NAMED


@pytest.mark.parametrize("name", NAMED)
def test_what_is_accepted_builds_and_takes_a_step(build_paper, name):
    numbers, built = random.Random(1), 0
    while built < 3:
        tree = drawn(name, numbers)
        tree["parallel"] = {"zero_stage": 0}
        found = checked(tree)
        if found is None or found[1]:
            continue
        objective, runner = build_paper(yaml.safe_dump(tree), std=0.1)
        assert objective.flops_per_image() > 0
        built += 1
        grammar = objective.backbone.grammar
        kinds = {
            word and word.kind for word in (grammar.reads, grammar.predicted, grammar.condition)
        }
        if kinds & {"ids", "pooled_features"} or grammar.memory:
            continue  # A tokenizer would be opened.
        state = objective.training_sequence(objective.backbone.blank_batch(2, torch.device("cpu")))
        inputs, targets = state.inputs, state.targets
        for layer in runner.layers.modules:
            inputs = layer(inputs)
        loss = objective.loss(inputs, targets)
        loss.backward()
        assert torch.isfinite(loss), tree


def test_checks_import_no_torch():
    code = "import sys, megavis.grammar.checks, megavis.grammar.compose, megavis.papers.givt.config"
    code += "; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
