"""Activation memory of a block: what it keeps from the forward to the backward pass.

Follows "Reducing Activation Recomputation in Large Transformer Models", section 4, adapted to
megavis's blocks, whose norms work in float32 and whose attention stores no score matrix.
"""

from __future__ import annotations

from dataclasses import dataclass

from megavis.planning.fp8_memory import FP8, attention_difference, weight_copies
from megavis.planning.layouts import Layout
from megavis.planning.shape import StackShape

AROUND_ACTIVATION = 2
"""Tensors of the MLP's width: input and output of its activation function."""


@dataclass(frozen=True)
class BlockActivations:
    """Bytes per image that a block keeps for the backward pass.

    `weights` are copies in FP8, divided by the images of a micro-batch.
    """

    norms: float
    attention: float
    mlp: float
    weights: float

    @property
    def total(self) -> float:
        """Sum of all parts."""
        return self.norms + self.attention + self.mlp + self.weights


def block_activations(
    shape: StackShape, layout: Layout, *, is_last: bool = False
) -> BlockActivations:
    """Return what a block keeps if it is not recomputed as a whole.

    With `selective` it keeps no outputs of norms and of the activation function.

    Args:
        shape: stack of the block.
        layout: whose tensor, sequence and context parallelism divide the activations.
        is_last: the last block of the stack, which continues only with the tokens that are read.
    """
    work, width, size = shape.work, shape.hidden_size, shape.number_size
    read, recomputes = work.num_last_queries if is_last else work.num_tokens, is_selective(layout)
    # The input, and per token the standard deviation and, if subtracted, the mean.
    norm = size * width if recomputes else 4 * width + 4 * (1 + shape.is_layer_norm)
    dropped = shape.residual_dropouts * width * read
    normalised = work.num_tokens + read * (2 if work.num_memory else 1)
    product_input = FP8 if shape.is_fp8 else size
    output = 0.0 if recomputes else product_input * width * read
    around = 1 if recomputes and not shape.mlp_dropout else AROUND_ACTIVATION
    inside = size * (around - 1) + product_input + shape.mlp_dropout
    return BlockActivations(
        norms=(normalised * norm + dropped + output) / shape.token_parts(layout),
        attention=_attention_activations(shape, layout, read),
        mlp=read * shape.mlp_size * inside / shape.parts(layout),
        weights=weight_copies(shape, layout) if shape.is_fp8 else 0.0,
    )


def _attention_activations(shape: StackShape, layout: Layout, read: int) -> float:
    """Return the bytes per image of the projections' inputs and of the attention kernel."""
    work, width, size = shape.work, shape.hidden_size, shape.number_size
    context, recomputes = shape.context_parts(layout), is_selective(layout)
    is_copied = shape.is_sequence_parallel(layout)
    # Tokens are selected from all of the tensor group's, a copy if they were split.
    selects = shape.in_bf16.multiplies_parts(layout)
    inputs = work.num_tokens / (context if selects else shape.token_parts(layout))
    if recomputes and not (selects and is_copied):
        inputs = 0.0
    if shape.visibility == "context" and selects:
        inputs += work.num_visible
    # Queries, keys, values and the output projection's input.
    split: float = 2 * read + 2 * work.num_visible
    if context > 1:
        # Heads are traded for tokens: the kernel's output besides the output projection's input.
        split += read
    projected, num_kernels = inputs, 1
    if work.num_memory:
        # Of the memory, which all blocks share, only keys and values; queries of all tokens.
        inputs += 0 if recomputes and not is_copied else read / context
        split += 2 * read + 2 * work.num_memory * context
        num_kernels = 2
    # Rotating or masking the kernel's output copies it.
    copies = shape.is_rotary or shape.visibility == "two_stream"
    states = num_kernels * 4 * shape.num_heads
    kernel = read * (size * width * copies + states) / shape.parts(layout)
    if shape.visibility == "two_stream":
        kernel += read * (size * work.num_visible + 1)
    if shape.is_fp8:
        kernel += attention_difference(shape, layout, read, projected)
    # The rotary tables, one pair for all blocks, are negligible.
    return size * width * (inputs + split / shape.parts(layout)) + kernel


def is_selective(layout: Layout) -> bool:
    """Return whether norms and activation functions are recomputed."""
    return layout.parallel.activation_checkpointing == "selective"
