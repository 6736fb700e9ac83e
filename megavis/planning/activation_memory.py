"""Activation memory: what a process keeps from the forward to the backward pass.

Blocks are counted (`block_activations.py`); the activations of the first and last layer are
measured (`boundary_activations.py`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from megavis.model.modulation import OF_BLOCK
from megavis.planning.block_activations import AROUND_ACTIVATION, block_activations, is_selective
from megavis.planning.boundary_activations import BoundaryActivations
from megavis.planning.layouts import Layout, layout_key
from megavis.planning.parameters import PipelineStage
from megavis.planning.shape import ModelShape, StackShape

_REPEATED = 2
"""Copies of a recomputed output: one with its own graph, and one where the first was."""
_FLOAT32 = 4


@dataclass(frozen=True)
class ActivationMemory:
    """Bytes of the micro-batches in flight on a process.

    Attributes:
        embedding: saved in the first layer, if this process has it, and the memory to which
            blocks attend, or the vectors that modulate them.
        below: saved in bridges and in the blocks of all but the top stack on this process.
        block: saved in each block of the top stack but the last.
        last_block: saved in the last of this process's blocks.
        head: saved in the last layer and the loss, if this process has them.
        num_blocks: blocks of the top stack on this process.
        in_flight: micro-batches whose backward pass has not finished.
        recomputed: one block, or its MLP's recomputed tensors, in the stack where the peak is.
        backward: gradients inside a block during its backward pass.
        head_backward: gradients inside the loss, or inside a recomputed block of the head, during
            its backward pass.
        transit: hidden states received from and sent to neighbouring stages.
        outputs: outputs of the last layer that DeepSpeed's pipeline keeps, besides those in `head`.
        freed: saved above that stack, and freed by the time of the peak.
        weights: gradient of an MLP matrix before accumulation, minus the second gradient of a
            norm, which is part of `backward` but does not exist at that time.
        bridge_pass: temporaries of a bridge's forward pass, minus what is saved above it later.
        encoding: tensors of a frozen network that encodes the images of a micro-batch, before its
            forward pass; on the first and last stage.
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
    encoding: float = 0.0

    @property
    def saved(self) -> float:
        """Bytes saved by autograd for all micro-batches in flight."""
        blocks = (self.num_blocks - 1) * self.block + self.last_block
        return self.in_flight * (self.embedding + self.below + blocks + self.head)

    @property
    def total(self) -> float:
        """Peak: in encoding, in a bridge, at the start of the backward pass, or in a stack's."""
        beginning = self.head_backward
        at_blocks = self.recomputed + self.backward + self.weights - self.freed
        passes = self.saved + max(self.bridge_pass, beginning, at_blocks)
        # Nothing of the micro-batch that is being encoded is saved yet.
        before = self.saved * (self.in_flight - 1) / self.in_flight + self.encoding
        return max(passes, before) + self.transit + self.outputs


def activation_memory(shape: ModelShape, layout: Layout, stage: int = 0) -> ActivationMemory:
    """Return the peak activation memory of a process in a pipeline stage."""
    images, ends = layout.micro_batch_size, shape.ends[layout_key(layout.parallel)]
    holds = shape.layers.stages(layout.pipeline)[stage]
    here = _stacks_on(shape, holds, ends, layout)
    *lower, upper = here
    embedding = ends.embedding * holds.is_first + _memory(upper.stack, layout)
    head = (ends.head + _decoder_in_fp8(shape, layout)) * holds.is_last
    # 1F1B: one micro-batch in flight for each following stage, and one for the stage itself.
    in_flight = min(layout.accumulation_steps, layout.pipeline - stage)
    moments = _moments(here, head, layout)
    worst = max(moments, key=lambda moment: images * moment.more + moment.weights)
    return ActivationMemory(
        embedding=images * embedding,
        below=images * (sum(stack.blocks for stack in lower) + sum(stack.bridge for stack in here)),
        block=images * upper.block,
        last_block=images * upper.last_block,
        head=images * head,
        num_blocks=upper.num_blocks,
        in_flight=in_flight,
        recomputed=images * worst.recomputed,
        backward=images * worst.backward,
        head_backward=_head_backward(shape, ends, layout) * holds.is_last,
        transit=images * _in_transit(shape, layout, stage, in_flight),
        outputs=images * _kept_outputs(ends, layout) * holds.is_last,
        freed=images * worst.freed,
        weights=worst.weights,
        bridge_pass=images * max(_bridge_passes(here, head)),
        encoding=images * _encoding(shape) * (holds.is_first or holds.is_last),
    )


def _encoding(shape: ModelShape) -> float:
    """Return the peak bytes per image of the frozen networks, which run one after another."""
    return max((network.working for network in shape.frozen), default=0.0)


@dataclass(frozen=True)
class _StackHere:
    """Bytes per image that a stage saves in its blocks of a stack and in the bridge above it.

    `bridge_pass` are the other temporaries of that bridge's forward pass.
    """

    stack: StackShape
    num_blocks: int
    block: float
    last_block: float
    bridge: float
    bridge_pass: float

    @property
    def blocks(self) -> float:
        """Bytes of all blocks."""
        return (self.num_blocks - 1) * self.block + self.last_block


def _stacks_on(
    shape: ModelShape, holds: PipelineStage, ends: BoundaryActivations, layout: Layout
) -> list[_StackHere]:
    """Return the stacks with blocks on a stage, from bottom to top."""
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


def _bridge_passes(here: Sequence[_StackHere], above: float) -> Iterator[float]:
    """Yield each bridge's temporaries minus what is saved above it later, from top to bottom."""
    for stack in reversed(here):
        yield stack.bridge_pass - above
        above += stack.blocks + stack.bridge


@dataclass(frozen=True)
class _Moment:
    """Bytes per image during the backward pass of a block; see `ActivationMemory`.

    `weights` does not depend on the number of images.
    """

    recomputed: float
    backward: float
    freed: float
    weights: float

    @property
    def more(self) -> float:
        """Bytes in addition to those at the start of the backward pass."""
        return self.recomputed + self.backward - self.freed


def _moments(here: Sequence[_StackHere], head: float, layout: Layout) -> Iterator[_Moment]:
    """Yield the backward pass of each stack, from top to bottom."""
    freed = head
    for stack in reversed(here):
        freed += stack.bridge
        shape, num_tokens = stack.stack, stack.stack.work.num_tokens
        # The memory's gradient is accumulated by the blocks above.
        gradients = num_tokens * _backward(shape, layout) + _memory(shape, layout)
        weights = _weights(shape, layout, num_tokens)
        yield _Moment(_recomputed(shape, layout), gradients, freed, weights)
        freed += stack.blocks


def _decoder_in_fp8(shape: ModelShape, layout: Layout) -> float:
    """Return the bytes per image that a decoder in the head keeps more than the measured bf16."""
    decoder = shape.decoder_in(layout)
    if decoder is None or not decoder.is_fp8:
        return 0.0
    pairs = (_kept_of_blocks(s, layout, is_top=True) for s in (decoder, decoder.in_bf16))
    block, last = (mixed - half for mixed, half in zip(*pairs, strict=True))
    return (decoder.num_layers - 1) * block + last


def _head_backward(shape: ModelShape, ends: BoundaryActivations, layout: Layout) -> float:
    """Return the peak bytes of gradients in the head's backward pass."""
    images, of_loss = layout.micro_batch_size, ends.loss_backward
    if shape.is_only_stack:
        return images * of_loss
    decoder = shape.decoder_in(layout)
    if decoder is None:
        # Layers without attention: the gradient of the widest tensor.
        return images * max(of_loss, ends.widest)
    recomputed, is_full = _recomputed(decoder, layout), _is_full(layout)
    # Without recomputation the peak is at the start of the backward pass, in the last block.
    is_last = not is_full or decoder.num_layers == 1
    if is_full and is_last:
        recomputed = block_activations(decoder, layout, is_last=True).total
    tokens = decoder.work.num_read if is_last else decoder.work.num_tokens
    freed = 0.0 if is_last else (decoder.num_layers - 1) * _hidden(decoder, layout)
    inside = recomputed + tokens * _backward(decoder, layout) - freed
    return max(images * of_loss, images * inside + _weights(decoder, layout, tokens))


def _weights(stack: StackShape, layout: Layout, num_tokens: int) -> float:
    """Return `ActivationMemory.weights` for a block with `num_tokens` per image."""
    matrix = stack.number_size * stack.hidden_size * stack.mlp_size / layout.tensor
    norm = _FLOAT32 * stack.hidden_size * num_tokens / stack.token_parts(layout)
    return max(0.0, matrix - layout.micro_batch_size * norm)


def _is_full(layout: Layout) -> bool:
    return layout.parallel.activation_checkpointing == "full"


def _memory(stack: StackShape, layout: Layout) -> float:
    """Return the bytes per image of the memory to which a stack attends, or of its modulation."""
    vectors = _hidden(stack, layout) if stack.work.is_modulated else 0.0
    return stack.number_size * stack.hidden_size * stack.work.num_memory + vectors


def _passing(stack: StackShape, layout: Layout) -> float:
    """Return the bytes per image of differentiable tensors carried with a stack's hidden states."""
    return _memory(stack, layout) + _passing_rows(stack, layout)


def _passing_rows(stack: StackShape, layout: Layout) -> float:
    """Return the bytes per image of the rows that bypass an encoder."""
    return stack.number_size * stack.num_passing / stack.token_parts(layout)


def _hidden(stack: StackShape, layout: Layout) -> float:
    """Return the bytes per image of a block's input."""
    return stack.number_size * stack.hidden_size * stack.work.num_tokens / stack.token_parts(layout)


def _kept_of_blocks(stack: StackShape, layout: Layout, *, is_top: bool) -> tuple[float, float]:
    """Return the bytes per image saved in a block, and in the last block of a stage."""
    if _is_full(layout):
        return (_hidden(stack, layout),) * 2
    block = block_activations(stack, layout).total
    return block, block_activations(stack, layout, is_last=is_top).total


def _recomputed(stack: StackShape, layout: Layout) -> float:
    """Return the bytes per image of a block, or of its MLP's input and activations, recomputed."""
    if _is_full(layout):
        return block_activations(stack, layout).total
    if not is_selective(layout):
        return 0.0
    inside = 0.0 if stack.mlp_dropout else stack.mlp_size / stack.parts(layout)
    numbers = stack.hidden_size / stack.token_parts(layout) + inside
    return _REPEATED * stack.number_size * stack.work.num_tokens * numbers


def _backward(shape: StackShape, layout: Layout) -> float:
    """Return the bytes per token of gradients in the MLP and, in float32, in a norm."""
    inside = shape.number_size * shape.mlp_size / shape.parts(layout)
    norm = 2 * _FLOAT32 * shape.hidden_size / shape.token_parts(layout)
    if shape.is_only_stack:
        # An upper bound for any activation function; other models have slack elsewhere.
        return AROUND_ACTIVATION * inside + norm
    # With sequence parallelism, the gradient of the MLP's output is gathered.
    split = shape.is_sequence_parallel(layout) / shape.context_parts(layout)
    gathered = shape.number_size * shape.hidden_size * split
    gradients = max(shape.mlp_gradients, AROUND_ACTIVATION * shape.is_fp8)
    # Of what is modulated, in parts and then joined.
    vectors = 2 * OF_BLOCK * shape.number_size * shape.hidden_size / shape.token_parts(layout)
    return max(gradients * inside + norm + gathered, vectors * shape.work.is_modulated)


def _in_transit(shape: ModelShape, layout: Layout, stage: int, in_flight: int) -> float:
    """Return the bytes per image that a stage sends to and receives from its neighbours."""
    if layout.pipeline == 1:
        return 0.0
    holds = shape.layers.stages(layout.pipeline)[stage]
    held = zip(shape.stacks, holds.blocks, (False, *holds.tops), strict=False)
    # A bridge outputs the hidden states of the stack above it.
    here = [(stack, count) for stack, count, is_given in held if count or is_given]
    stacks, (top, num_blocks) = [stack for stack, _ in here], here[-1]
    hidden = max(_hidden(stack, layout) for stack in stacks)
    from_below, to_above = stage > 0, stage < layout.pipeline - 1
    # Differentiable carried tensors. A bridge creates the ones of the stack above; a memory that
    # blocks of this stage attend to is included.
    made = _passing(top, layout) if not num_blocks else _passing_rows(top, layout) * (stage == 0)
    passing = (from_below * _passing(stacks[0], layout) + to_above * made) * in_flight
    passing += max(_passing(stack, layout) for stack in stacks)
    return hidden * ((from_below + to_above) * in_flight + 1) + passing


def _kept_outputs(ends: BoundaryActivations, layout: Layout) -> float:
    """Return the bytes per image of outputs that DeepSpeed keeps on the last stage.

    It has two buffers, and frees one when the next micro-batch takes it.
    """
    if layout.pipeline == 1:
        return 0.0
    return min(2, layout.accumulation_steps) * ends.outputs - ends.saved_outputs
