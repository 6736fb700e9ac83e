"""Activation memory: what a process keeps from the forward to the backward pass.

"Reducing Activation Recomputation in Large Transformer Models", section 4, counted anew for
megavis's own block, whose norms work in float32 and whose attention keeps no matrix of scores. What
the first and the last layer keep is measured (`boundary_activations.py`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from megavis.planning.boundary_activations import BoundaryActivations
from megavis.planning.layouts import Layout, layout_key
from megavis.planning.parameters import PipelineStage
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
        is_last: the last block of the stack, which continues with the tokens that are read.
    """
    work, width = shape.work, shape.hidden_size
    read = work.num_read if is_last else work.num_tokens
    numbers = shape.number_size * width
    # The input, and of each token the mean (where it is subtracted) and the deviation.
    norm = 4 * width + 4 * (1 + shape.is_layer_norm)
    dropped = shape.residual_dropouts * width * read
    normalised = work.num_tokens + read * (2 if work.num_memory else 1)
    return BlockActivations(
        norms=(normalised * norm + dropped + numbers * read) / shape.token_parts(layout),
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
    inputs = work.num_tokens / (1 if chooses else shape.token_parts(layout))
    if shape.visibility == "context":
        inputs += work.num_visible
    # Queries, keys and values, what the output matrix takes; a rotated key besides the first one.
    split = 2 * read + (2 + shape.is_rotary) * work.num_visible
    num_kernels = 1
    if work.num_memory:
        # Of the memory, which all blocks share, only keys and values; queries from all tokens.
        inputs, split = inputs + read, split + 2 * read + 2 * work.num_memory
        num_kernels = 2
    kernel = 0.0
    if layout.parallel.activation_checkpointing != "selective":
        # What is turned or masked after the kernel is copied for the output matrix.
        copies = shape.is_rotary or shape.visibility == "two_stream"
        states = num_kernels * 4 * shape.num_heads
        kernel = read * (size * width * copies + states) / layout.tensor
        if shape.visibility == "two_stream":
            kernel += read * (size * work.num_visible + 1)
    # Sines and cosines of positions are one pair for all blocks: too little to count.
    return size * width * (inputs + split / layout.tensor) + kernel


@dataclass(frozen=True)
class ActivationMemory:
    """Bytes of the micro-batches that a process has under way.

    Attributes:
        embedding: saved in the first layer, where this process has it, and the memory to which
            blocks attend.
        below: saved in the blocks of this process's stacks but the uppermost, and in bridges.
        block: saved in each block of the uppermost stack but the last.
        last_block: saved in the last of this process's blocks.
        head: saved in the last layer and the loss, where this process has them.
        num_blocks: of the uppermost stack on this process.
        in_flight: micro-batches whose backward pass is still to come.
        recomputed: one block's, or one attention's, while it is recomputed: of the stack where
            that comes to most.
        backward: gradients inside one of its blocks while its backward pass runs.
        head_backward: gradients inside the loss, or what a block of the head recomputes and its
            gradients, while their backward pass runs.
        transit: hidden states that came from, and go to, neighbouring stages.
        outputs: what the last layer gave, where DeepSpeed's pipeline keeps it.
        freed: saved above that stack, and gone by then.
        weights: what the gradient of a matrix of the MLP, before it is added up, takes more than
            the second gradient of a norm, which is counted with `backward` and not there then.
        bridge_pass: what the forward pass of a bridge holds besides what it saves, less what is
            saved above it later.
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
    freed: float
    weights: float
    bridge_pass: float

    @property
    def saved(self) -> float:
        """What autograd saves, in all micro-batches under way."""
        blocks = (self.num_blocks - 1) * self.block + self.last_block
        return self.in_flight * (self.embedding + self.below + blocks + self.head)

    @property
    def total(self) -> float:
        """The most at once: in a bridge, as the backward pass begins, or as it is in a stack."""
        beginning = self.head_backward
        at_blocks = self.recomputed + self.backward + self.weights - self.freed
        return (
            self.saved + max(self.bridge_pass, beginning, at_blocks) + self.transit + self.outputs
        )


def activation_memory(shape: ModelShape, layout: Layout, stage: int = 0) -> ActivationMemory:
    """Return what a process of a pipeline stage keeps, at the worst moment of a step."""
    images, ends = layout.micro_batch_size, shape.ends[layout_key(layout.parallel)]
    holds = shape.layers.stages(layout.pipeline)[stage]
    here = _stacks_on(shape, holds, ends, layout)
    *lower, upper = here
    embedding = ends.embedding * holds.is_first + _memory(upper.stack)
    head = ends.head * holds.is_last
    # One forward, one backward: a stage has as many under way as stages follow, and its own.
    in_flight = min(layout.accumulation_steps, layout.pipeline - stage)
    moments = _moments(here, head, layout)
    worst = max(moments, key=lambda moment: images * moment.more + moment.weights)
    return ActivationMemory(
        embedding=images * embedding,
        below=images * (sum(stack.blocks for stack in lower) + sum(_bridges(here))),
        block=images * upper.block,
        last_block=images * upper.last_block,
        head=images * head,
        num_blocks=upper.num_blocks,
        in_flight=in_flight,
        recomputed=images * worst.recomputed,
        backward=images * worst.backward,
        head_backward=_head_backward(shape, ends, layout) * holds.is_last,
        transit=images * _in_transit(shape, layout, stage, in_flight),
        outputs=images * ends.outputs * _kept_outputs(layout) * holds.is_last,
        freed=images * worst.freed,
        weights=worst.weights,
        bridge_pass=images * max(_bridge_passes(here, head)),
    )


@dataclass(frozen=True)
class _StackHere:
    """Bytes an image that a stage saves in its blocks of a stack, and in the bridge above it.

    `bridge_pass` is what the forward pass of that bridge holds besides.
    """

    stack: StackShape
    num_blocks: int
    block: float
    last_block: float
    bridge: float
    bridge_pass: float

    @property
    def blocks(self) -> float:
        """All blocks."""
        return (self.num_blocks - 1) * self.block + self.last_block


def _stacks_on(
    shape: ModelShape, holds: PipelineStage, ends: BoundaryActivations, layout: Layout
) -> list[_StackHere]:
    """Return the stacks of which a stage has blocks, from below."""
    bridges = zip((*ends.bridges, 0.0), (*ends.bridge_passes, 0.0), strict=True)
    return [
        _StackHere(
            stack,
            count,
            *_kept_of_blocks(stack, layout, is_top=is_top),
            *(is_top * each for each in bridge),
        )
        for stack, count, is_top, bridge in zip(
            shape.stacks, holds.blocks, holds.tops, bridges, strict=True
        )
        if count
    ]


def _bridges(here: Sequence[_StackHere]) -> Iterator[float]:
    return (stack.bridge for stack in here if stack.bridge)


def _bridge_passes(here: Sequence[_StackHere], above: float) -> Iterator[float]:
    """Yield what is held in each bridge, from above, less what is saved above it later."""
    for stack in reversed(here):
        yield stack.bridge_pass - above
        above += stack.blocks + stack.bridge


@dataclass(frozen=True)
class _Moment:
    """Bytes an image while the backward pass of a block runs; see `ActivationMemory`.

    Those of `weights` are the same for any number of images.
    """

    recomputed: float
    backward: float
    freed: float
    weights: float

    @property
    def more(self) -> float:
        """What there is more than where the backward pass begins."""
        return self.recomputed + self.backward - self.freed


def _moments(here: Sequence[_StackHere], head: float, layout: Layout) -> Iterator[_Moment]:
    """Yield the backward pass of each stack, from above, with what is freed by then."""
    freed = head
    for stack in reversed(here):
        freed += stack.bridge
        yield _moment(stack.stack, layout, freed)
        freed += stack.blocks


def _moment(stack: StackShape, layout: Layout, freed: float) -> _Moment:
    # The memory has a gradient to which the blocks above have added.
    gradients = stack.work.num_tokens * _backward(stack, layout) + _memory(stack)
    weights = _weights(stack, layout, stack.work.num_tokens)
    return _Moment(_recomputed(stack, layout), gradients, freed, weights)


def _head_backward(shape: ModelShape, ends: BoundaryActivations, layout: Layout) -> float:
    """Return the bytes of the worst moment of the head's backward pass."""
    # Gradients of the scores, and of what the loss made of them first.
    images, scores = layout.micro_batch_size, 2 * ends.scores
    if shape.is_alone:
        return images * scores
    if shape.decoder is None:
        # Layers without attention: the gradient of the widest tensor.
        return images * max(scores, ends.widest)
    decoder = shape.decoder
    recomputed, is_full = _recomputed(decoder, layout), _is_full(layout)
    # Unless blocks are recomputed, most is there where the backward pass begins: in the last one.
    is_last = not is_full or decoder.num_layers == 1
    if is_full and is_last:
        recomputed = block_activations(decoder, layout, is_last=True).total
    tokens = decoder.work.num_read if is_last else decoder.work.num_tokens
    freed = 0.0 if is_last else (decoder.num_layers - 1) * _hidden(decoder, layout)
    inside = recomputed + tokens * _backward(decoder, layout) - freed
    return max(images * scores, images * inside + _weights(decoder, layout, tokens))


def _weights(stack: StackShape, layout: Layout, num_tokens: int) -> float:
    """Return the bytes of `ActivationMemory.weights` for a block of so many tokens an image."""
    matrix = stack.number_size * stack.hidden_size * stack.mlp_size / layout.tensor
    norm = _FLOAT32 * stack.hidden_size * num_tokens / stack.token_parts(layout)
    return max(0.0, matrix - layout.micro_batch_size * norm)


def _is_full(layout: Layout) -> bool:
    """True where all that a block saves is recomputed."""
    return layout.parallel.activation_checkpointing == "full"


def _memory(stack: StackShape) -> float:
    """Return the bytes an image of what a stack attends to besides its own tokens."""
    return stack.number_size * stack.hidden_size * stack.work.num_memory


def _passing(stack: StackShape, layout: Layout) -> float:
    """Return the bytes an image that travel with the hidden states of a stack, with a gradient."""
    return _memory(stack) + _passing_rows(stack, layout)


def _passing_rows(stack: StackShape, layout: Layout) -> float:
    """Return the bytes an image of the rows that travel past an encoder."""
    return stack.number_size * stack.num_passing / stack.token_parts(layout)


def _hidden(stack: StackShape, layout: Layout) -> float:
    """Return the bytes an image of the hidden states in front of a block."""
    return stack.number_size * stack.hidden_size * stack.work.num_tokens / stack.token_parts(layout)


def _kept_of_blocks(stack: StackShape, layout: Layout, *, is_top: bool) -> tuple[float, float]:
    """Return the bytes an image kept in a block of a stage, and in the last one of the stage."""
    if _is_full(layout):
        return (_hidden(stack, layout),) * 2
    block = block_activations(stack, layout).total
    return block, block_activations(stack, layout, is_last=is_top).total


def _recomputed(stack: StackShape, layout: Layout) -> float:
    """Return the bytes an image of one block, or one attention, while it is recomputed."""
    if _is_full(layout):
        return block_activations(stack, layout).total
    attention = stack.number_size * stack.hidden_size * stack.work.num_tokens / layout.tensor
    return attention * (layout.parallel.activation_checkpointing == "selective")


def _backward(shape: StackShape, layout: Layout) -> float:
    """Return the bytes a token of gradients in the MLP, and in float32 in a norm."""
    inside, parts = shape.number_size * shape.mlp_size / layout.tensor, shape.token_parts(layout)
    norm = 2 * _FLOAT32 * shape.hidden_size / parts
    if shape.is_alone:
        # As much as any activation function takes: what other models share out has a margin here.
        return _AROUND_ACTIVATION * inside + norm
    # Where tokens are split, the gradient of what the MLP gives is gathered.
    gathered = shape.number_size * shape.hidden_size * (parts > 1)
    return shape.mlp_gradients * inside + norm + gathered


def _in_transit(shape: ModelShape, layout: Layout, stage: int, in_flight: int) -> float:
    """Return the bytes an image that a stage keeps for its neighbours, and of what it receives."""
    if layout.pipeline == 1:
        return 0.0
    holds = shape.layers.stages(layout.pipeline)[stage]
    held = zip(shape.stacks, holds.blocks, (False, *holds.tops), strict=False)
    # A bridge gives the states of the stack above it.
    here = [(stack, count) for stack, count, is_given in held if count or is_given]
    stacks, (top, num_blocks) = [stack for stack, _ in here], here[-1]
    hidden = max(_hidden(stack, layout) for stack in stacks)
    from_below, to_above = stage > 0, stage < layout.pipeline - 1
    # What is carried with a gradient. A bridge makes all of it for the stack above; a memory that
    # blocks of this stage attend to is counted with these.
    made = _passing(top, layout) if not num_blocks else _passing_rows(top, layout) * (stage == 0)
    passing = (from_below * _passing(stacks[0], layout) + to_above * made) * in_flight
    passing += max(_passing(stack, layout) for stack in stacks)
    return hidden * ((from_below + to_above) * in_flight + 1) + passing


def _kept_outputs(layout: Layout) -> int:
    """Return of how many micro-batches DeepSpeed keeps what the last stage gave.

    It has two buffers there, and frees what is in one when the next micro-batch takes it.
    """
    return min(2, layout.accumulation_steps) if layout.pipeline > 1 else 0
