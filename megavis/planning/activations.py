"""What a process keeps of the images that it works on, from the forward to the backward pass.

"Reducing Activation Recomputation in Large Transformer Models", section 4, counted anew for
megavis's own block, whose norms work in float32 and whose attention keeps no matrix of scores. What
the first and the last layer keep is measured (`ends.py`).
"""

from __future__ import annotations

from dataclasses import dataclass

from megavis.planning.layouts import Layout, way_of
from megavis.planning.shape import ModelShape

_AROUND_ACTIVATION = 2
"""Tensors of the MLP's width: what its activation function is of, and what it gives."""
_FLOAT32 = 4


@dataclass(frozen=True)
class BlockActivations:
    """Bytes that a block keeps for the backward pass, for one image."""

    norms: float
    attention: float
    mlp: float

    @property
    def total(self) -> float:
        """All of them."""
        return self.norms + self.attention + self.mlp


def block_activations(
    shape: ModelShape, layout: Layout, *, is_last: bool = False
) -> BlockActivations:
    """Return what a block keeps where nothing is recomputed but, by `selective`, attention.

    Args:
        shape: the model.
        layout: tensor and sequence parallelism divide, each what it splits.
        is_last: the last block of the model, which goes on with the tokens that are read.
    """
    work, width = shape.work, shape.hidden_size
    read = work.num_read if is_last else work.num_tokens
    numbers = shape.number_size * width
    # The input, and of each token the mean (where it is subtracted) and the deviation.
    norm = 4 * width + 4 * (1 + shape.is_layer_norm)
    dropped = shape.residual_dropouts * width * read
    return BlockActivations(
        norms=((work.num_tokens + read) * norm + dropped + numbers * read) / layout.token_parts,
        attention=_attention_activations(shape, layout, read),
        mlp=read
        * shape.mlp_size
        * (shape.number_size * _AROUND_ACTIVATION + shape.mlp_dropout)
        / layout.tensor,
    )


def _attention_activations(shape: ModelShape, layout: Layout, read: int) -> float:
    """Return the bytes of an image: inputs of the projections, and what the kernel keeps."""
    work, width, size = shape.work, shape.hidden_size, shape.number_size
    chooses = shape.visibility in ("two_stream", "context")
    # Where tokens are chosen, they are chosen from the whole sequence.
    inputs = work.num_tokens / (1 if chooses else layout.token_parts)
    if shape.visibility == "context":
        inputs += work.num_seen
    # Queries, keys and values, what the output matrix takes; a rotated key beside the first one.
    split = 2 * read + (2 + shape.is_rotary) * work.num_seen
    kernel = 0.0
    if layout.parallel.activation_checkpointing != "selective":
        # What is turned or masked after the kernel is copied for the output matrix.
        copies = shape.is_rotary or shape.visibility == "two_stream"
        kernel = read * (size * width * copies + 4 * shape.num_heads) / layout.tensor
        if shape.visibility == "two_stream":
            kernel += read * (size * work.num_seen + 1)
    # Sines and cosines in float32, half as many as a head has channels, for queries and for keys.
    angles = shape.is_rotary * 4 * (width // shape.num_heads) * (read + work.num_seen)
    return size * width * (inputs + split / layout.tensor) + kernel + angles


@dataclass(frozen=True)
class ActivationMemory:
    """Bytes of the micro-batches that a process has under way.

    Attributes:
        embedding: saved in the first layer, where this process has it.
        block: saved in each block but the last.
        last_block: saved in the last of this process's blocks.
        head: saved in the last layer and the loss, where this process has them.
        num_blocks: on this process.
        in_flight: micro-batches whose backward pass is still to come.
        recomputed: one block's, or one attention's, while it is recomputed.
        backward: gradients inside one block while its backward pass runs.
        head_backward: gradients inside the loss while its backward pass runs.
        transit: hidden states that came from, and go to, neighbouring stages.
        outputs: what the last layer gave, where DeepSpeed's pipeline keeps it.
    """

    embedding: float
    block: float
    last_block: float
    head: float
    num_blocks: int
    in_flight: int
    recomputed: float
    backward: float
    head_backward: float
    transit: float
    outputs: float

    @property
    def saved(self) -> float:
        """What autograd saves, in all micro-batches under way."""
        blocks = (self.num_blocks - 1) * self.block + self.last_block
        return self.in_flight * (self.embedding + blocks + self.head)

    @property
    def total(self) -> float:
        """The most at once: where the backward pass begins, or where it has come to the blocks.

        What the head had saved is gone by then.
        """
        beginning = self.head_backward
        at_blocks = self.recomputed + self.backward - self.in_flight * self.head
        return self.saved + max(beginning, at_blocks) + self.transit + self.outputs


def activation_memory(shape: ModelShape, layout: Layout, stage: int = 0) -> ActivationMemory:
    """Return what a process of a pipeline stage keeps, at the worst moment of a step."""
    images, work, ends = layout.micro_batch_size, shape.work, shape.ends[way_of(layout.parallel)]
    is_first, is_last = stage == 0, stage == layout.pipeline - 1
    hidden = shape.number_size * shape.hidden_size * work.num_tokens / layout.token_parts
    kept, recomputed = _kept_of_blocks(shape, layout, hidden, is_last=is_last)
    # One forward, one backward: a stage has as many under way as stages follow, and its own.
    in_flight = min(layout.accumulation_steps, layout.pipeline - stage)
    return ActivationMemory(
        embedding=images * ends.embedding * is_first,
        block=images * kept[0],
        last_block=images * kept[1],
        head=images * ends.head * is_last,
        num_blocks=layout.blocks_of_a_stage(shape.num_layers),
        in_flight=in_flight,
        recomputed=images * recomputed,
        backward=images * work.num_tokens * _backward(shape, layout),
        # Gradients of the scores, and of what the loss made of them first.
        head_backward=images * 2 * ends.scores * is_last,
        transit=images * hidden * _states_in_transit(layout, stage, in_flight),
        outputs=images * ends.outputs * _kept_outputs(layout) * is_last,
    )


def _kept_of_blocks(
    shape: ModelShape, layout: Layout, hidden: float, *, is_last: bool
) -> tuple[tuple[float, float], float]:
    """Return the bytes an image kept in a block and in the last one, and recomputed in one."""
    block = block_activations(shape, layout).total
    last = block_activations(shape, layout, is_last=is_last).total
    checkpointing = layout.parallel.activation_checkpointing
    if checkpointing == "full":
        return (hidden, hidden), block
    attention = shape.number_size * shape.hidden_size * shape.work.num_tokens / layout.tensor
    return (block, last), attention * (checkpointing == "selective")


def _backward(shape: ModelShape, layout: Layout) -> float:
    """Return the bytes a token of gradients in the MLP, and in float32 in a norm."""
    inside = shape.number_size * shape.mlp_size * _AROUND_ACTIVATION / layout.tensor
    return inside + 2 * _FLOAT32 * shape.hidden_size / layout.token_parts


def _states_in_transit(layout: Layout, stage: int, in_flight: int) -> int:
    """Return how many a stage keeps for its neighbours, and the one that is being received."""
    if layout.pipeline == 1:
        return 0
    neighbours = (stage > 0) + (stage < layout.pipeline - 1)
    return neighbours * in_flight + 1


def _kept_outputs(layout: Layout) -> int:
    """Return of how many micro-batches DeepSpeed keeps what the last stage gave.

    It has two buffers there, and frees what is in one when the next micro-batch takes it.
    """
    return min(2, layout.accumulation_steps) if layout.pipeline > 1 else 0
