"""What a block's products in FP8 keep for the backward pass, besides or instead of bf16.

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

from megavis.planning.layouts import Layout
from megavis.planning.shape import StackShape

FP8 = 1
"""Bytes per number."""
_ORDERS = 2


def weight_copies(shape: StackShape, layout: Layout) -> float:
    """Return the bytes of a block's matrices in FP8, per image of a micro-batch.

    Queries, keys and values of cross-attention are not computed in FP8.
    """
    width, crosses = shape.hidden_size, shape.work.num_memory > 0
    matrices = width * ((4 + crosses) * width + 2 * shape.mlp_size)
    return FP8 * _ORDERS * matrices / layout.tensor / layout.micro_batch_size


def attention_difference(shape: StackShape, layout: Layout, read: int, inputs: float) -> float:
    """Return the bytes per image that attention keeps more than in bf16, which may be negative.

    Args:
        shape: stack of the block.
        layout: whose tensor, sequence and context parallelism divide the activations.
        read: tokens whose queries are computed.
        inputs: tokens that the projection of self-attention saves in bf16.
    """
    work, parts = shape.work, shape.parts(layout)
    # All tokens, of which some are chosen afterwards.
    projected = work.num_tokens / shape.token_parts(layout)
    # The kernel saves its output too, if that is not copied before the output projection.
    is_traded = shape.context_parts(layout) > 1
    is_copied = shape.is_rotary or shape.visibility == "two_stream" or is_traded
    outputs, dropped = read / parts, is_copied * read / parts
    if work.num_memory:
        outputs += read / parts
    width = shape.hidden_size
    return width * (FP8 * (projected + outputs) - shape.number_size * (inputs + dropped))
