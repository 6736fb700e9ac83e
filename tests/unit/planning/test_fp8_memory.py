"""Memory of blocks whose products are in FP8, by hand from what Transformer Engine saves."""

from dataclasses import replace
from pathlib import Path

import pytest
from small_configs import SMALL_ENCODER

from megavis.config.load import load_config
from megavis.config.section import ParallelConfig
from megavis.papers import build_objective
from megavis.planning.activation_memory import activation_memory
from megavis.planning.activations import (
    Growth,
    LayerActivations,
    ModelActivations,
    StackActivations,
)
from megavis.planning.fp8_memory import fp8_difference
from megavis.planning.layouts import Layout, layout_key
from megavis.planning.shape import ModelShape, shape_of

pytestmark = pytest.mark.once

PRESETS = Path(__file__).parents[3] / "yaml_configs"
FP8 = [
    "training.precision=bf16",
    "parallel.zero_stage=1",
    "training.kernels=transformer_engine",
    "training.fp8=true",
]
IMAGES = 16


def shape_in_fp8(context, name: str, *words: str) -> ModelShape:
    """Return a preset's shape, without measured activations."""
    config = load_config(PRESETS / f"{name}.yaml", [*FP8, *words]).config
    config = config.model_copy(update={"model": config.model.without_dropout()})
    return shape_of(build_objective(config, context), {})


@pytest.fixture(scope="module")
def shape(context) -> ModelShape:
    return shape_in_fp8(context, "igpt/m_32")


def without_fp8(shape: ModelShape) -> ModelShape:
    decoder = shape.decoder and shape.decoder.in_bf16
    return replace(shape, stacks=tuple(each.in_bf16 for each in shape.stacks), decoder=decoder)


def without_activations(shape: ModelShape, kind: str = "none") -> ModelShape:
    """Return a shape whose layers save nothing in bf16."""
    key = layout_key(ParallelConfig(activation_checkpointing=kind))
    none = LayerActivations(0.0, backward=Growth(((0.0, 0.0),)))
    stacks = (StackActivations(none, none),) * len(shape.stacks)
    return replace(shape, activations={key: ModelActivations(none, stacks, none)})


def layout_of(accumulation: int = 1, **keys) -> Layout:
    return Layout(ParallelConfig(**keys), 1, IMAGES, accumulation)


def test_block_of_one_stream(shape):
    """iGPT-M: 1024 tokens of width 1024, 8 heads."""
    width = tokens = 1024
    (stack,) = shape.stacks
    found = fp8_difference(stack, layout_of())
    # Inputs of four products, one of them four times as wide: 1 byte instead of 2.
    # The kernel's output is kept besides the output projection's input.
    assert found.saved == tokens * width * (2 - 3 - 4)
    # Twelve matrices of width², and their transposes.
    assert found.fixed == 2 * 12 * width**2
    # The gradient of the MLP's inner width in both orders.
    assert found.backward == 2 * tokens * 4 * width


def test_tensor_group_shares_copies(shape):
    """Four processes: matrices and the MLP are split, tokens only with sequence parallelism."""
    width = tokens = 1024
    (stack,) = shape.stacks
    keys = {"tensor_model_parallel_size": 4}
    split, cut = (
        fp8_difference(stack, layout_of(**keys, sequence_parallel=each)) for each in (False, True)
    )
    assert split.fixed == cut.fixed == 2 * 12 * width**2 / 4
    # Whole: inputs of the first projection and of the MLP. By heads and by columns: the kernel's
    # output, now kept, and the MLP's inner input.
    assert split.saved == tokens * width * (-1 - 1 + (1 - 4) / 4)
    assert cut.saved == tokens * width * (-1 - 1 + 1 - 4) / 4


def test_copied_outputs_of_attention_are_saved_in_fp8_only(shape):
    """Context parallelism trades heads for tokens after the kernel, whose own output remains."""
    width = tokens = 1024
    (stack,) = shape.stacks
    found = fp8_difference(stack, layout_of(context_parallel_size=4))
    # Inputs of four products, one four times as wide: 1 byte instead of 2.
    assert found.saved == -tokens * width * (1 + 1 + 1 + 4) / 4
    assert found.fixed == 2 * 12 * width**2


def test_cross_attention_is_projected_in_bf16(context):
    """GIVT's encoder-decoder: queries, keys and values of cross-attention are no whole product."""
    width = tokens = 64
    stack = shape_in_fp8(context, "givt/encoder_decoder", *SMALL_ENCODER).stacks[-1]
    found = fp8_difference(stack, layout_of())
    # More: two outputs of kernels. Less: inputs of self-attention's projection and of the MLP,
    # and the inner input.
    assert found.saved == width * tokens * (2 - 1 - 1 - 4)
    assert found.fixed == 2 * 13 * width**2


def test_two_streams_and_a_decoder(context):
    """DARL: 64 patches in two streams, of which one has keys and values."""
    width, tokens = 128, 128
    shape = shape_in_fp8(context, "darl/demo", "objective.two_streams=true")
    (stack,) = shape.stacks
    found = fp8_difference(stack, layout_of())
    # The input of the projection and the masked output of attention, 2 bytes of all tokens, now 1,
    # and the MLP's inputs.
    assert found.saved == -width * tokens * (2 + 1 + 4)
    assert found.fixed == 2 * 12 * width**2
    # The decoder of two blocks, on the last stage.
    decoder, planned = shape.decoder, activation_memory(without_activations(shape), layout_of())
    assert decoder is not None
    block, last = (fp8_difference(decoder, layout_of(), is_last=each) for each in (False, True))
    assert planned.head == IMAGES * (block.saved + last.saved) + block.fixed + last.fixed


@pytest.mark.parametrize("kind", ["none", "full"])
def test_copies_of_weights_live_as_long_as_activations(shape, kind):
    """Two of 18 blocks' micro-batches are in flight on the first of two stages."""
    width = tokens = 1024
    layout = layout_of(4, pipeline_model_parallel_size=2, activation_checkpointing=kind)
    mixed, half = (
        activation_memory(without_activations(each, kind), layout)
        for each in (shape, without_fp8(shape))
    )
    more = 2 * 12 * width**2 - IMAGES * tokens * 5 * width
    gradients = IMAGES * 2 * tokens * 4 * width
    assert half.saved == half.passes == 0
    if kind == "full":
        # Only hidden states are kept, and one block is recomputed.
        assert (mixed.saved, mixed.passes) == (0, more + gradients)
    else:
        assert mixed.saved == pytest.approx(2 * 18 * more)
