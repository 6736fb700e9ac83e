"""What a process keeps of the images that it works on, from the forward to the backward pass.

"Reducing Activation Recomputation in Large Transformer Models", section 4, counted anew for
megavis's own block, whose norms work in float32 and whose attention keeps no matrix of scores. What
the first and the last layer keep is measured (`ends.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megavis.planning.ends import Ends
from megavis.planning.layouts import Layout, way_of
from megavis.planning.parameters import Stage
from megavis.planning.shape import ModelShape, StackShape

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
    shape: StackShape, layout: Layout, *, is_last: bool = False
) -> BlockActivations:
    """Return what a block keeps where nothing is recomputed but, by `selective`, attention.

    Args:
        shape: its stack.
        layout: tensor and sequence parallelism divide, each what it splits.
        is_last: the last block of the stack, which goes on with the tokens that are read.
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


def _attention_activations(shape: StackShape, layout: Layout, read: int) -> float:
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
        below: saved in the blocks of this process's stacks but the uppermost, and in bridges.
        block: saved in each block of the uppermost stack but the last.
        last_block: saved in the last of this process's blocks.
        head: saved in the last layer and the loss, where this process has them.
        num_blocks: of the uppermost stack on this process.
        in_flight: micro-batches whose backward pass is still to come.
        recomputed: one block's, or one attention's, while it is recomputed.
        backward: gradients inside one block while its backward pass runs.
        head_backward: gradients inside the loss, or what a block of the head recomputes and its
            gradients, while their backward pass runs.
        transit: hidden states that came from, and go to, neighbouring stages.
        outputs: what the last layer gave, where DeepSpeed's pipeline keeps it.
    """

    embedding: float
    below: float
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
        return self.in_flight * (self.embedding + self.below + blocks + self.head)

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
    images, ends = layout.micro_batch_size, shape.ends[way_of(layout.parallel)]
    holds = shape.layers.stages(layout.pipeline)[stage]
    is_first, is_last = holds.is_first, holds.is_last
    *lower, (upper, num_blocks, is_top) = shape.blocks_of(holds)
    block, last_block = _kept_of_blocks(upper, layout, is_top=is_top)
    stacks = [stack for stack, _, _ in (*lower, (upper, num_blocks, is_top))]
    # One forward, one backward: a stage has as many under way as stages follow, and its own.
    in_flight = min(layout.accumulation_steps, layout.pipeline - stage)
    return ActivationMemory(
        embedding=images * ends.embedding * is_first,
        below=images * _kept_below(lower, holds, ends, layout),
        block=images * block,
        last_block=images * last_block,
        head=images * ends.head * is_last,
        num_blocks=num_blocks,
        in_flight=in_flight,
        recomputed=max(images * _recomputed(stack, layout) for stack in stacks),
        backward=max(images * stack.work.num_tokens * _backward(stack, layout) for stack in stacks),
        head_backward=images * _head_backward(upper, ends, layout) * is_last,
        transit=max(
            images * _hidden(stack, layout) * _states_in_transit(layout, stage, in_flight)
            for stack in stacks
        ),
        outputs=images * ends.outputs * _kept_outputs(layout) * is_last,
    )


def _kept_below(
    lower: Sequence[tuple[StackShape, int, bool]], holds: Stage, ends: Ends, layout: Layout
) -> float:
    """Return the bytes an image kept in the lower stacks of a stage, and in its bridges."""
    kept = sum(here * saved for here, saved in zip(holds.tops, ends.bridges, strict=False))
    for stack, count, is_top in lower:
        block, last = _kept_of_blocks(stack, layout, is_top=is_top)
        kept += (count - 1) * block + last
    return kept


def _head_backward(stack: StackShape, ends: Ends, layout: Layout) -> float:
    """Return the bytes an image of the worst moment of the head's backward pass."""
    # Gradients of the scores, and of what the loss made of them first.
    scores = 2 * ends.scores
    # A block of the head has as many gradients to what it keeps as one of the stack below it.
    share = (
        stack.work.num_tokens * _backward(stack, layout) / block_activations(stack, layout).total
    )
    return max(scores, ends.recomputed * (1 + share))


def _hidden(stack: StackShape, layout: Layout) -> float:
    """Return the bytes an image of the hidden states in front of a block."""
    return stack.number_size * stack.hidden_size * stack.work.num_tokens / layout.token_parts


def _kept_of_blocks(stack: StackShape, layout: Layout, *, is_top: bool) -> tuple[float, float]:
    """Return the bytes an image kept in a block of a stage, and in the last one of the stage."""
    if layout.parallel.activation_checkpointing == "full":
        return (_hidden(stack, layout),) * 2
    block = block_activations(stack, layout).total
    return block, block_activations(stack, layout, is_last=is_top).total


def _recomputed(stack: StackShape, layout: Layout) -> float:
    """Return the bytes an image of one block, or one attention, while it is recomputed."""
    checkpointing = layout.parallel.activation_checkpointing
    if checkpointing == "full":
        return block_activations(stack, layout).total
    attention = stack.number_size * stack.hidden_size * stack.work.num_tokens / layout.tensor
    return attention * (checkpointing == "selective")


def _backward(shape: StackShape, layout: Layout) -> float:
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
