"""Memory that a block's FP8 products save for the backward pass, in addition to or instead of bf16.

Read in the sources of Transformer Engine 2.9.0, 2.11.0 and 2.20.2 (`_Linear` and
`Float8TensorStorage`), for the recipe `Float8CurrentScaling`:

- A linear layer saves its input in FP8, in one of the two orders of storage: 1 byte per number.
- It also saves its weight in FP8. Below compute capability 10 products are possible in one order
  only, so both the weight and its transpose are saved: 2 bytes per number, counted for every
  device. Since `is_first_microbatch` is None (`model/transformer_engine.py`), copies are not shared
  by micro-batches, and live from the forward to the backward pass of each.
- A gradient is rounded in both orders, also 2 bytes per number, while it exists in bf16 too.
"""

from __future__ import annotations

from dataclasses import dataclass

from megavis.planning.layouts import Layout
from megavis.planning.shape import StackShape

FP8 = 1
"""Bytes per number."""
_ORDERS = 2


@dataclass(frozen=True)
class Fp8Difference:
    """Additional bytes of a block in FP8 compared with bf16; negative if fewer.

    Attributes:
        saved: bytes kept for the backward pass of an image.
        fixed: bytes kept for all images of a micro-batch.
        backward: recomputed tensors and gradients in the backward pass of an image.
        backward_fixed: tensors recomputed for all images.
    """

    saved: float
    fixed: float
    backward: float
    backward_fixed: float = 0.0


def fp8_difference(shape: StackShape, layout: Layout, *, is_last: bool = False) -> Fp8Difference:
    """Return the additional memory of a block in FP8 compared with bf16.

    Args:
        shape: stack of the block.
        layout: layout, whose tensor, sequence and context parallelism divide the activations.
        is_last: the last block of the stack, which continues only with the tokens that are read.
    """
    read = shape.work.num_last_queries if is_last else shape.work.num_tokens
    kind = layout.parallel.activation_checkpointing
    entering = read * shape.mlp_input_size / shape.parts(layout)
    inside = read * shape.mlp_size / shape.parts(layout)
    # Inputs of the MLP's products. In bf16 `selective` keeps neither, but what dropout has changed.
    normed = shape.hidden_size * read / shape.token_parts(layout)
    half = normed + inside
    if kind == "selective":
        half = inside if shape.drops_inside else 0.0
    kept = FP8 * (normed + inside) - shape.number_size * half
    kept += _attention_difference(shape, layout, read)
    # The gradient of the MLP's input exists in bf16 and in both orders of FP8.
    gradients = (_ORDERS * FP8) * entering
    # Weights, except for queries, keys and values of cross-attention.
    width, crosses = shape.hidden_size, shape.work.num_memory > 0
    matrices = shape.block_parameters + crosses * width**2
    copies = FP8 * _ORDERS * matrices / layout.tensor
    if kind == "full":
        return Fp8Difference(0.0, 0.0, kept + gradients, copies)
    return Fp8Difference(kept, copies, gradients)


def _attention_difference(shape: StackShape, layout: Layout, read: int) -> float:
    """Return the additional bytes per image of attention in FP8, for `read` queries."""
    work, parts = shape.work, shape.parts(layout)
    is_split = shape.is_sequence_parallel(layout)
    # FP8 projects all tokens and chooses some afterwards.
    projected = work.num_tokens / shape.token_parts(layout)
    # In bf16 chosen tokens are projected: all of the tensor group's, and keys' and values' again.
    selects = shape.in_bf16.multiplies_parts(layout)
    inputs = work.num_tokens / shape.context_parts(layout) if selects else projected
    if layout.parallel.activation_checkpointing == "selective" and not (selects and is_split):
        inputs = 0.0
    if shape.visibility == "context" and selects:
        inputs += work.num_visible
    # The kernel saves its output too, if that is not copied before the output projection.
    is_traded = shape.context_parts(layout) > 1
    is_copied = shape.is_rotary or shape.visibility == "two_stream" or is_traded
    outputs, dropped = read / parts, is_copied * read / parts
    if work.num_memory:
        outputs += read / parts
    # Unless they are rotated, queries are a view of the projection of all tokens, which stays; keys
    # and values of the first tokens are too, those of tokens from a list are copies.
    if selects and not shape.is_rotary:
        views = read + 2 * work.num_visible * (shape.visibility == "two_stream")
        dropped -= (3 * work.num_tokens - views) / parts
    width = shape.hidden_size
    return width * (FP8 * (projected + outputs) - shape.number_size * (inputs + dropped))
