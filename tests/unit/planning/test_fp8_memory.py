"""Memory of blocks whose products are in FP8, by hand from what Transformer Engine saves."""

from dataclasses import replace
from pathlib import Path

import pytest
from small_configs import SMALL_ENCODER

from megavis.config.load import load_config
from megavis.config.section import ParallelConfig
from megavis.papers import build_objective
from megavis.planning.activation_memory import activation_memory
from megavis.planning.block_activations import block_activations
from megavis.planning.boundary_activations import BoundaryActivations
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
    """Return a preset's shape, without activations of the first and last layer."""
    config = load_config(PRESETS / f"{name}.yaml", [*FP8, *words]).config
    config = config.model_copy(update={"model": config.model.without_dropout()})
    return shape_of(build_objective(config, context), {})


@pytest.fixture(scope="module")
def shape(context) -> ModelShape:
    return shape_in_fp8(context, "igpt/m_32")


def in_bf16(shape: ModelShape) -> ModelShape:
    decoder = shape.decoder and shape.decoder.in_bf16
    return replace(shape, stacks=tuple(each.in_bf16 for each in shape.stacks), decoder=decoder)


def without_ends(shape: ModelShape, kind: str = "none") -> ModelShape:
    """Return a shape whose first and last layer save nothing."""
    key = layout_key(ParallelConfig(activation_checkpointing=kind))
    return replace(shape, ends={key: BoundaryActivations(*[0.0] * 5)})


def layout_of(accumulation: int = 1, **keys) -> Layout:
    return Layout(ParallelConfig(**keys), 1, IMAGES, accumulation)


def test_block_of_one_stream(shape):
    """iGPT-M: 1024 tokens of width 1024, 8 heads."""
    width = tokens = 1024
    (stack,) = shape.stacks
    found = block_activations(stack, layout_of())
    # Inputs of two norms in float32, and a deviation. The MLP's input: 1 byte.
    assert found.norms == tokens * (2 * (4 * width + 4) + width)
    # Inputs of both projections: 1 byte each.
    # Queries, keys, values and outputs of the kernel: 2; its state.
    assert found.attention == tokens * (2 * width + 4 * 2 * width + 4 * 8)
    # Four times the width: the activation's input, 2 bytes, and output, 1.
    assert found.mlp == tokens * 4 * width * 3
    # Twelve matrices of width², and their transposes, for all images.
    assert found.weights == 2 * 12 * width**2 / IMAGES
    half = block_activations(stack.in_bf16, layout_of())
    assert half.total - found.total == tokens * 5 * width - found.weights


def test_tensor_group_shares_copies(shape):
    """Four processes: matrices and the MLP are split, tokens only with sequence parallelism."""
    width = tokens = 1024
    (stack,) = shape.stacks
    keys = {"tensor_model_parallel_size": 4}
    split, cut = (
        block_activations(stack, layout_of(**keys, sequence_parallel=each))
        for each in (False, True)
    )
    assert split.weights == cut.weights == 2 * 12 * width**2 / 4 / IMAGES
    assert split.mlp == cut.mlp == tokens * width * 3
    # The input of the first projection whole, the rest by heads.
    assert split.attention == tokens * (width + (width + 8 * width + 32) / 4)
    assert cut.attention == tokens * (2 * width + 8 * width + 32) / 4


def test_copied_outputs_of_attention_are_saved_in_fp8_only(shape):
    """Context parallelism trades heads for tokens after the kernel, whose own output remains."""
    width = tokens = 1024
    (stack,) = shape.stacks
    layout = layout_of(context_parallel_size=4)
    half, mixed = (block_activations(each, layout) for each in (stack.in_bf16, stack))
    # 2 bytes for the inputs of both projections, now 1.
    assert half.attention - mixed.attention == 2 * tokens * width / 4
    assert mixed.weights == 2 * 12 * width**2 / IMAGES


def test_cross_attention_is_projected_in_bf16(context):
    """GIVT's encoder-decoder: queries, keys and values of cross-attention are no whole product."""
    width = tokens = 64
    stack = shape_in_fp8(context, "givt/encoder_decoder", *SMALL_ENCODER).stacks[-1]
    half, mixed = (block_activations(each, layout_of()) for each in (stack.in_bf16, stack))
    # More: two outputs of kernels. Less: the input of self-attention's projection.
    assert mixed.attention - half.attention == width * 2 * tokens - width * tokens
    assert half.norms - mixed.norms == width * tokens
    assert half.mlp - mixed.mlp == 4 * width * tokens
    assert mixed.weights == 2 * 13 * width**2 / IMAGES


def test_two_streams_and_a_decoder(context):
    """DARL: 64 patches in two streams, of which one has keys and values."""
    width, tokens = 128, 128
    shape = shape_in_fp8(context, "darl/demo", "objective.two_streams=true")
    (stack,) = shape.stacks
    half, mixed = (block_activations(each, layout_of()) for each in (stack.in_bf16, stack))
    # The input of the projection and the masked output of attention, 2 bytes of all tokens, now 1.
    assert half.attention - mixed.attention == 2 * width * tokens
    assert mixed.weights == 2 * 12 * width**2 / IMAGES
    # The decoder of two blocks, on the last stage.
    decoder, found = shape.decoder, activation_memory(without_ends(shape), layout_of())
    assert decoder is not None
    blocks = [
        block_activations(each, layout_of(), is_last=is_last).total
        for is_last in (False, True)
        for each in (decoder, decoder.in_bf16)
    ]
    assert found.head == IMAGES * (blocks[0] - blocks[1] + blocks[2] - blocks[3])


@pytest.mark.parametrize("kind", ["none", "full"])
def test_copies_of_weights_live_as_long_as_activations(shape, kind):
    """Two of 18 blocks' micro-batches are in flight on the first of two stages."""
    width = tokens = 1024
    layout = layout_of(4, pipeline_model_parallel_size=2, activation_checkpointing=kind)
    mixed, half = (
        activation_memory(without_ends(each, kind), layout) for each in (shape, in_bf16(shape))
    )
    less = IMAGES * tokens * 5 * width - 2 * 12 * width**2
    if kind == "full":
        # Only hidden states are kept, and one block is recomputed.
        assert (mixed.saved, half.recomputed - mixed.recomputed) == (half.saved, less)
    else:
        assert half.saved - mixed.saved == pytest.approx(2 * 18 * less)
