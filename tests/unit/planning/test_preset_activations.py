"""The activations of every preset with Transformer blocks can be measured, in its own layout."""

from pathlib import Path

import pytest

from megavis.config.load import load_config
from megavis.planning.layouts import layout_key
from megavis.planning.measured_activations import activations_of_layouts

pytestmark = pytest.mark.once

ROOT = Path(__file__).parents[3] / "yaml_configs"


def is_measured(config):
    """Return whether a preset has blocks, and reads no network that the checkout lacks."""
    condition = getattr(config.objective, "condition", None)
    return config.objective.has_blocks and not getattr(condition, "tokenizer", None)


def test_every_preset_is_measured():
    configs = [load_config(path).config for path in sorted(ROOT.glob("*/*.yaml"))]
    measured = [config for config in configs if is_measured(config)]
    left_out = {config.objective.name for config in configs if config not in measured}
    assert left_out == {"vae", "vqgan", "compose"}
    failures = {}
    for config in measured:
        try:
            found = activations_of_layouts([config])[layout_key(config.parallel)]
        except (RuntimeError, ValueError) as error:
            failures[config.name] = str(error)
        else:
            assert found.stacks
            assert all(stack.block.kept(1) >= 0 for stack in found.stacks)
            assert found.outputs > 0
    assert not failures
