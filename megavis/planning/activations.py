"""Activations of the layers of a model, as functions of the images of a micro-batch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Growth:
    """The most bytes at any moment, as a function of the images of a micro-batch.

    `moments` are pairs of bytes per image and bytes for all images, such as the gradient of a
    weight; none is below another in both.
    """

    moments: tuple[tuple[float, float], ...] = ()

    def most(self, images: int) -> float:
        """Return the bytes for a number of images."""
        return max((images * each + fixed for each, fixed in self.moments), default=0.0)


@dataclass(frozen=True)
class LayerActivations:
    """Activations of a layer on one process of a tensor and a context group.

    Attributes:
        saved: bytes per image kept for its backward pass.
        fixed: bytes kept for all images together: gains of norms in float32.
        shared: bytes per image kept that the layers of a stack share: tensors carried with the
            hidden states, such as an encoder's output.
        forward: bytes allocated in its forward pass, including those it keeps.
        backward: bytes allocated in its backward pass besides those kept, including the gradients
            of its outputs and recomputed tensors.
    """

    saved: float
    fixed: float = 0.0
    shared: float = 0.0
    forward: Growth = Growth()
    backward: Growth = Growth()

    def kept(self, images: int) -> float:
        """Return the bytes kept of a micro-batch, without those that are shared."""
        return images * self.saved + self.fixed


@dataclass(frozen=True)
class StackActivations:
    """Activations of a stack's blocks, and of the bridge above them, if there is one.

    The last block continues only with the tokens that are read from it.

    Attributes:
        lower: all blocks but the last, if they do not all equal `block`.
    """

    block: LayerActivations
    last_block: LayerActivations
    bridge: tuple[LayerActivations, ...] = ()
    lower: tuple[LayerActivations, ...] = ()

    @property
    def mean_saved(self) -> float:
        """Mean bytes per image that a block saves."""
        every = (*self.lower, self.last_block) if self.lower else (self.block,)
        return sum(each.saved for each in every) / len(every)


@dataclass(frozen=True)
class ModelActivations:
    """Activations of all layers in one kind of layout.

    Attributes:
        first: activations of the first layer.
        stacks: activations of the blocks, from bottom to top.
        head: activations of the last layer, with a stack inside it, and of the loss.
        outputs: bytes per image of the last layer's output.
        saved_outputs: the part of them that is included in `head.saved`.
        head_flops: operations of the head of fine-tuning and its loss in both passes of an image.
    """

    first: LayerActivations
    stacks: tuple[StackActivations, ...]
    head: LayerActivations
    outputs: float = 0.0
    saved_outputs: float = 0.0
    head_flops: float = 0.0
