"""Activation memory that a process keeps from the forward to the backward pass, and its peak.

The layers' activations are measured (`measured_activations.py`); here they are added up for a
pipeline stage. The memory of FP8 blocks is computed (`fp8_memory.py`), since Transformer Engine
needs a GPU.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from megavis.planning.activations import Growth, LayerActivations, ModelActivations
from megavis.planning.fp8_memory import Fp8Difference, fp8_difference
from megavis.planning.layouts import Layout, layout_key
from megavis.planning.parameters import PipelineStage
from megavis.planning.shape import ModelShape, StackShape


@dataclass(frozen=True)
class ActivationMemory:
    """Bytes of the micro-batches in flight on a process.

    Attributes:
        first: saved in the first layer, if this process has it.
        block: saved in a block of the top stack on this process.
        blocks: saved in all blocks and bridges, with the tensors that blocks share.
        head: saved in the last layer and the loss, if this process has them.
        in_flight: micro-batches whose backward pass has not finished.
        passes: bytes at the worst moment of a micro-batch's passes beyond those saved by its
            forward pass: gradients, recomputed tensors and temporaries, less what has been freed.
        transit: hidden states received from and sent to neighbouring stages.
        outputs: outputs of the last layer that DeepSpeed's pipeline keeps, besides those in `head`.
        encoding: tensors of a frozen network that encodes the images of a micro-batch, before its
            forward pass; on the first and last stage.
    """

    first: float
    block: float
    blocks: float
    head: float
    in_flight: int
    passes: float
    transit: float
    outputs: float
    encoding: float = 0.0

    @property
    def saved(self) -> float:
        """Bytes saved by autograd for all micro-batches in flight."""
        return self.in_flight * (self.first + self.blocks + self.head)

    @property
    def total(self) -> float:
        """Peak: in encoding, or in the passes of a micro-batch."""
        # The micro-batch that is being encoded has not saved anything yet.
        before = self.saved * (self.in_flight - 1) / self.in_flight + self.encoding
        return max(self.saved + self.passes, before) + self.transit + self.outputs


def activation_memory(shape: ModelShape, layout: Layout, stage: int = 0) -> ActivationMemory:
    """Return the peak activation memory of a process in a pipeline stage."""
    images, measured = layout.micro_batch_size, shape.activations[layout_key(layout.parallel)]
    holds = shape.layers.stages(layout.pipeline)[stage]
    first: list[_Alike] = [(measured.first, 1)] if holds.is_first else []
    blocks = list(_blocks_on(shape, measured, holds, layout))
    with_decoder = _with_decoder_in_fp8(shape, measured.head, layout)
    head: list[_Alike] = [(with_decoder, 1)] if holds.is_last else []
    shared = sum(
        each.block.shared
        for each, count in zip(measured.stacks, holds.blocks, strict=True)
        if count
    )
    # 1F1B: one micro-batch in flight for each following stage, and one for the stage itself.
    in_flight = min(layout.accumulation_steps, layout.pipeline - stage)
    return ActivationMemory(
        first=_kept(first, images),
        block=blocks[0][0].kept(images),
        blocks=_kept(blocks, images) + images * shared,
        head=_kept(head, images),
        in_flight=in_flight,
        passes=_passes(
            [*first, *blocks, *head], images, keeps_last=holds.is_last and layout.pipeline > 1
        ),
        transit=images * _in_transit(shape, layout, stage, in_flight),
        outputs=images * _kept_outputs(measured, layout) * holds.is_last,
        # Frozen networks run one after another.
        encoding=images
        * max((network.working for network in shape.frozen), default=0.0)
        * (holds.is_first or holds.is_last),
    )


_Alike = tuple[LayerActivations, int]
"""Equal consecutive layers, and their number."""


def _kept(layers: Sequence[_Alike], images: int) -> float:
    return sum(count * layer.kept(images) for layer, count in layers)


def _passes(layers: Sequence[_Alike], images: int, *, keeps_last: bool) -> float:
    """Return the peak bytes during both passes of a micro-batch beyond those that layers save.

    With `keeps_last`, tensors saved by the last layer are freed only after the backward pass of all
    layers, as was found in DeepSpeed's pipeline engine.
    """
    below, moments = 0.0, []
    held = layers[-1][0].kept(images) if keeps_last else 0.0
    for position, (layer, count) in enumerate(layers, start=1):
        kept = layer.kept(images)
        # Of equal layers, the top one has the most below it.
        below += count * kept
        moments.append(below - kept + layer.forward.most(images))
        moments.append(below + layer.backward.most(images) + held * (position < len(layers)))
    return max(moments) - below


def _blocks_on(
    shape: ModelShape, measured: ModelActivations, holds: PipelineStage, layout: Layout
) -> Iterator[_Alike]:
    """Yield the blocks of a stage, and the bridges above them, from bottom to top."""
    held = zip(shape.stacks, measured.stacks, holds.blocks, holds.tops, strict=True)
    for stack, found, count, is_top in held:
        # Models whose blocks differ run on one stage.
        lower = [(layer, 1) for layer in found.lower] or [(found.block, count - is_top)]
        for layer, alike in lower:
            if alike:
                yield _in_fp8(layer, stack, layout, is_last=False), alike
        if is_top:
            yield _in_fp8(found.last_block, stack, layout, is_last=True), 1
            yield from ((bridge, 1) for bridge in found.bridge)


def _in_fp8(
    layer: LayerActivations, stack: StackShape, layout: Layout, *, is_last: bool
) -> LayerActivations:
    """Return the activations of a block if it multiplies its matrices in FP8."""
    if not stack.is_fp8:
        return layer
    return _more(layer, fp8_difference(stack, layout, is_last=is_last))


def _with_decoder_in_fp8(
    shape: ModelShape, head: LayerActivations, layout: Layout
) -> LayerActivations:
    """Return the activations of a head, of which a decoder may be in FP8."""
    decoder = shape.decoder_in(layout)
    if decoder is None or not decoder.is_fp8:
        return head
    block, last = (fp8_difference(decoder, layout, is_last=each) for each in (False, True))
    below = decoder.num_layers - 1
    whole = replace(
        last, saved=last.saved + below * block.saved, fixed=last.fixed + below * block.fixed
    )
    return _more(head, whole)


def _more(layer: LayerActivations, more: Fp8Difference) -> LayerActivations:
    moments = (
        (each + more.backward, fixed + more.backward_fixed)
        for each, fixed in layer.backward.moments
    )
    return replace(
        layer,
        saved=layer.saved + more.saved,
        fixed=layer.fixed + more.fixed,
        backward=Growth(tuple(moments)),
    )


def _passing(stack: StackShape, layout: Layout) -> float:
    """Return the bytes per image of differentiable tensors carried with a stack's hidden states."""
    memory = stack.number_size * stack.hidden_size * stack.work.num_memory
    return memory + _passing_rows(stack, layout)


def _passing_rows(stack: StackShape, layout: Layout) -> float:
    """Return the bytes per image of the rows that bypass an encoder."""
    return stack.number_size * stack.num_passing / stack.token_parts(layout)


def _hidden(stack: StackShape, layout: Layout) -> float:
    """Return the bytes per image of a block's input."""
    return stack.number_size * stack.hidden_size * stack.work.num_tokens / stack.token_parts(layout)


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


def _kept_outputs(measured: ModelActivations, layout: Layout) -> float:
    """Return the bytes per image of outputs that DeepSpeed keeps on the last stage.

    It has two buffers, and frees one when the next micro-batch takes it.
    """
    if layout.pipeline == 1:
        return 0.0
    return min(2, layout.accumulation_steps) * measured.outputs - measured.saved_outputs
