"""Weights of a released form: copied into a model of ours, and read as a preset's."""

from pathlib import Path

import torch

from megavis.config.load import load_config
from megavis.weights.released import blank_weights
from megavis.weights.tables import ours_of, write_table

PRESETS = Path(__file__).parents[2] / "yaml_configs"


def on_meta(shapes):
    """Return tensors of these shapes by name, without data."""
    return {name: torch.empty(shape, device="meta") for name, shape in shapes.items()}


def assert_is_preset(found, preset, **objective):
    """Check names and shapes of what was read, and that its sections are a preset's.

    Args:
        found: a `Released`, of tensors on the meta device.
        preset: path below yaml_configs.
        objective: keys in which an imported run differs.

    Returns:
        Our parameters, on the meta device.
    """
    config = found.config(Path("runs/imported"))
    own = blank_weights(config)
    found.tensors.check(write_table(found.table, own))
    assert ours_of(found.table) == own.keys()
    wanted = load_config(PRESETS / preset).config
    assert config.objective == wanted.objective.model_copy(update=objective)
    assert config.model == wanted.model
    assert config.data.image_size == wanted.data.image_size
    return own


def copy_named(inference, named):
    """Copy tensors by the names of our parameters, each of which has one."""
    parameters = dict(inference.layers.named_parameters())
    assert parameters.keys() == named.keys()
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(named[name])
