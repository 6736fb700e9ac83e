"""Activations measured on the meta device, by hand for a block of iGPT-M in six layouts."""

from dataclasses import fields, is_dataclass
from pathlib import Path

import pytest

from megavis.config.load import load_config
from megavis.papers import build_objective
from megavis.parallel.context import close_context, open_virtual_context
from megavis.planning.activations import Growth, ModelActivations
from megavis.planning.layouts import layout_key
from megavis.planning.measured_activations import activations_of, activations_of_layouts

pytestmark = pytest.mark.once

PRESETS = Path(__file__).parents[3] / "yaml_configs"
TOKENS = WIDTH = 1024
TENSOR, CONTEXT = "parallel.tensor_model_parallel_size=4", "parallel.context_parallel_size=4"
SPLIT = "parallel.sequence_parallel=true"

# Bytes per token. Inputs of two norms in float32, each with a standard deviation.
NORMS = 2 * (4 * WIDTH + 4)
# Inputs of the projection of attention and of the MLP, in bf16.
INPUTS = 2 * 2 * WIDTH
# Queries, keys, values and output of the kernel, and the sums of 8 heads in float32.
HEADS = 4 * 2 * WIDTH + 4 * 8
# Input and output of the activation function.
INSIDE = 2 * 2 * 4 * WIDTH


def measured(*words: str) -> ModelActivations:
    half = ["training.precision=bf16", "parallel.zero_stage=1"]
    config = load_config(PRESETS / "igpt/m_32.yaml", [*half, *words]).config
    config = config.model_copy(update={"model": config.model.without_dropout()})
    return activations_of_layouts([config])[layout_key(config.parallel)]


@pytest.mark.parametrize(
    ("words", "kept"),
    [
        ([], NORMS + INPUTS + HEADS + INSIDE),
        ([TENSOR], NORMS + INPUTS + (HEADS + INSIDE) / 4),
        ([TENSOR, SPLIT], (NORMS + INPUTS + HEADS + INSIDE) / 4),
        # The output of attention is kept by heads and by tokens.
        ([CONTEXT], (NORMS + INPUTS + HEADS + INSIDE + 2 * WIDTH) / 4),
        # The norms' inputs in bf16, and the activation's input.
        (["parallel.activation_checkpointing=selective"], 2 * 2 * WIDTH + HEADS + INSIDE / 2),
        (["parallel.activation_checkpointing=full"], 2 * WIDTH),
    ],
)
def test_a_block_keeps_what_is_counted_by_hand(words, kept):
    (stack,) = measured(*words).stacks
    assert stack.block.saved == stack.last_block.saved == TOKENS * kept
    assert stack.block.shared == 0


def test_gradients_of_a_block_by_hand():
    """In the MLP's backward pass: around the activation, and of the MLP's output and input."""
    (stack,) = measured().stacks
    images, matrix = 16, 2 * 4 * WIDTH**2
    # The output's gradient in bf16, and one of the inner width; or that and a matrix's.
    least = images * TOKENS * (2 * WIDTH + 2 * 4 * WIDTH)
    assert least < stack.block.backward.most(images) < least + matrix + images * TOKENS * 20 * WIDTH
    # With one image a weight's gradient is the larger part.
    assert stack.block.backward.most(1) > matrix


def test_full_recomputation_allocates_the_whole_block_again():
    (plain,), (full,) = measured().stacks, measured("parallel.activation_checkpointing=full").stacks
    # With its output, which the next block already had.
    again = plain.block.saved + 2 * TOKENS * WIDTH
    more = full.block.backward.most(16) - plain.block.backward.most(16)
    assert more == pytest.approx(16 * again, rel=1e-3)


def test_the_largest_moment_depends_on_the_images():
    growth = Growth(((10.0, 0.0), (1.0, 100.0)))
    assert [growth.most(images) for images in (1, 11, 12, 20)] == [101, 111, 120, 200]


@pytest.mark.parametrize("preset", ["igpt/s_32.yaml", "compose/instructed_latents.yaml"])
def test_ways_that_are_measured_together_equal_each_alone(preset):
    """Layers are shared by the ways in which they run alike; an MLP alone has none of `full`."""
    words = "none", "selective", "full"
    presets = [
        load_config(PRESETS / preset, [f"parallel.activation_checkpointing={word}"]).config
        for word in words
    ]
    together = activations_of_layouts(presets)
    assert len(together) == 3
    plain, _, full = (together[layout_key(config.parallel)] for config in presets)
    assert full.head is plain.head
    context = open_virtual_context(0, 1, device="meta")
    try:
        for config in presets:
            alone = activations_of(build_objective(config, context))
            key = layout_key(config.parallel)
            assert sorted_moments(together[key]) == sorted_moments(alone)
    finally:
        close_context()


def sorted_moments(activations: object) -> object:
    """Return the fields as tuples, moments in one order, which a set does not have."""
    if isinstance(activations, Growth):
        return sorted(activations.moments)
    if is_dataclass(activations):
        return [sorted_moments(getattr(activations, each.name)) for each in fields(activations)]
    if isinstance(activations, tuple):
        return [sorted_moments(each) for each in activations]
    return activations
