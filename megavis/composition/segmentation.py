"""Fine-tuning of a paper's Vision Transformer to predict the class of each pixel.

The features of four blocks are put back on their grid and read by UPerNet (`model/dense.py`), as in
the code of "BEiT: BERT Pre-Training of Image Transformers" for ADE20K. The features are the
residual stream after a block, without a norm.

Legend: b images, H and W pixels, s rows, h hidden size, g × g patches, c classes.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megavis.composition.finetuned import NO_LABEL, Finetuned
from megavis.composition.trainable import SequenceBatch, SumAndCount
from megavis.data.format.manifest import Manifest
from megavis.data.loading.loader import Batch
from megavis.model.context_parallel import all_tokens
from megavis.model.core import Core
from megavis.model.dense import NUM_LEVELS, FCNHead, FeaturePyramid, UPerHead
from megavis.model.layer_state import LayerState, PackedState
from megavis.model.parameters import set_start
from megavis.model.stack import FeatureLayer, LayerPlan
from megavis.schedules.orders import gather_tokens

AUXILIARY_LEVEL = 2
"""Level of the pyramid that the auxiliary head reads: the one of the grid's size, as in BEiT."""

_AUXILIARY = 256
"""Channels of the auxiliary head in that recipe, at most UPerNet's."""


class SegmentHead(nn.Module):
    """UPerNet on the residual stream after four blocks, and an auxiliary head.

    Replicated on every process of the tensor group.

    Args:
        order: int64 `[1, n]`, the patch, in raster order, of each of the last n rows.
        below: residual streams `[s, b, h]` after the lower blocks, which their layers append in
            every forward pass; the head clears it.
        levels: for each level of the pyramid the number of its stream; the head's input is last.
    """

    def __init__(
        self,
        core: Core,
        order: Tensor,
        below: list[Tensor],
        levels: Sequence[int],
        *,
        grid: tuple[int, int],
        num_classes: int,
        channels: int,
        dropout: float,
    ) -> None:
        super().__init__()
        self.core, self.grid, self.below, self.levels = core, grid, below, levels
        self.register_buffer("rows", order.argsort(dim=1), persistent=False)
        width = core.megatron.hidden_size
        self.pyramid = FeaturePyramid(width)
        self.segments = UPerHead(width, channels, num_classes, dropout=dropout)
        self.auxiliary = FCNHead(width, min(channels, _AUXILIARY), num_classes, dropout=dropout)
        # The pretrained run has no head for these classes.
        set_start(self.parameters(), "fresh")

    def forward(self, state: PackedState) -> tuple[Tensor, Tensor]:
        """Map the `PackedState` of `[s, b, h]` to logits `[b, c, 4 g, 4 g]` and `[b, c, g, g]`."""
        hidden = LayerState.unpack(state, self.core.carried_names).hidden
        streams = [*self.below, hidden]
        self.below.clear()
        grids = [self._on_grid(stream) for stream in streams]
        levels = self.pyramid([grids[level] for level in self.levels])
        return self.segments(levels).float(), self.auxiliary(levels[AUXILIARY_LEVEL]).float()

    def _on_grid(self, stream: Tensor) -> Tensor:
        """Return the rows of patches `[b, h, g, g]`; rows in front of them are left out."""
        tokens = all_tokens(stream, self.core.megatron, self.core.groups).transpose(0, 1)
        rows = cast(Tensor, self.rows)
        patches = gather_tokens(tokens[:, -rows.shape[1] :], rows)
        return patches.transpose(1, 2).unflatten(2, self.grid)


class Segmentation(Finetuned):
    """A paper's model up to its highest feature layer, and a head that classifies pixels."""

    def check_data(self, manifest: Manifest) -> Iterator[str]:
        """Check that the shards are pairs of an image and a map of segments with classes."""
        if manifest.target is None or manifest.target.kind != "panoptic":
            found = manifest.kind if manifest.target is None else f"{manifest.target.kind} maps"
            yield (
                f"holds {found}; finetune.task segments needs pairs with maps of segments, which"
                " `data_tools maps` writes"
            )

    @property
    def layers(self) -> tuple[int, ...]:
        """Numbers of blocks below each level's features; by default every quarter of all."""
        depth = self.config.model.num_layers
        quarters = range(1, NUM_LEVELS + 1)
        every = tuple(math.ceil(depth * quarter / NUM_LEVELS) for quarter in quarters)
        return self.settings.layers or every

    def layer_plans(self) -> list[LayerPlan]:
        """Return the paper's layers below the highest feature, and the head."""
        plans, kept = self.backbone.layer_plans(), list[Tensor]()
        readable = [place for place, plan in enumerate(plans) if plan.gives_features]
        *lower, highest = (readable[layer] for layer in sorted(set(self.layers)))
        below = self.with_frozen(plans[:highest])
        for place in lower:
            plan = below[place]
            below[place] = dataclasses.replace(
                plan, factory=partial(_kept, plan.factory, kept), variant=(*plan.variant, "read")
            )
        top = dataclasses.replace(
            plans[highest],
            name="segments",
            factory=partial(self._build_head, kept),
            gives_features=False,
            inner=None,
            stack=None,
            flops=0.0,
            handed=kept,
        )
        return self.with_layer_decay([*below, top])

    def _build_head(self, below: list[Tensor]) -> SegmentHead:
        settings, first = self.settings, torch.zeros(1, dtype=torch.int64)
        layers = sorted(set(self.layers))
        return SegmentHead(
            self.backbone.core,
            self.backbone.schedule.for_features(first).order,
            below,
            [layers.index(layer) for layer in self.layers],
            grid=self.backbone.reads.grid,
            num_classes=settings.num_classes,
            channels=settings.width_of_head,
            dropout=settings.head_dropout,
        )

    def flops_per_image(self) -> float:
        """Return the FLOPs of a training step for one image, without the head's."""
        return self.feature_flops(self.layers[-1])

    def sequence(self, batch: Batch) -> SequenceBatch:
        """Return the image's sequence for features, and the class of each pixel as the target."""
        images, maps = batch.inputs[:, 0], batch.inputs[:, 1]
        shown = dataclasses.replace(batch, inputs=images)
        return SequenceBatch(self.backbone.feature_inputs(shown), (pixel_classes(maps),))

    def blank_batch(self, num_images: int, device: torch.device) -> Batch:
        """Return blank images, with maps of void."""
        batch = super().blank_batch(num_images, device)
        pairs = torch.stack([batch.inputs, batch.inputs], dim=1)
        return dataclasses.replace(batch, inputs=pairs)

    def inputs_from(
        self, inputs: Any, *, sample_index: Tensor | None = None, **options: Any
    ) -> tuple[Tensor, ...]:
        """Return `SequenceBatch.inputs` for images `[b, H, W, 3]`, or pairs as in the shards."""
        self.check_options(options)
        images = inputs[:, 0] if inputs.ndim == 5 else inputs
        return self.backbone.inputs_for_features(images, None)

    def loss(self, predictions: Any, targets: tuple[Tensor, ...]) -> Tensor:
        """Return the cross-entropy of pixels in nats, with the auxiliary head's.

        Void pixels contribute 0 to an image's mean over all pixels, as in BEiT's code.
        """
        (classes,) = targets
        own, auxiliary = predictions
        loss = _pixel_loss(own, classes)
        if self.settings.auxiliary_weight:
            loss = loss + self.settings.auxiliary_weight * _pixel_loss(auxiliary, classes)
        return loss

    def measures(self, predictions: Any, targets: tuple[Tensor, ...]) -> Mapping[str, SumAndCount]:
        """Return the share of pixels, void ones left out, whose class is right, as `accuracy`."""
        (classes,) = targets
        found = resized_logits(predictions[0], classes.shape[1:]).argmax(1)
        return {"accuracy": ((found == classes).sum(), (classes != NO_LABEL).sum())}

    def outputs(self, predictions: Any) -> Tensor:
        """Return logits `[b, c, 4 g, 4 g]`."""
        logits: Tensor = predictions[0]
        return logits


def pixel_classes(maps: Tensor) -> Tensor:
    """Return the classes int64 `[b, H, W]` of maps uint8 `[b, H, W, 3]`; `NO_LABEL` for void."""
    return maps[..., 0].long() - 1


def resized_logits(logits: Tensor, size: torch.Size) -> Tensor:
    """Resize logits `[b, c, ...]` bilinearly to H and W pixels."""
    return F.interpolate(logits, size=tuple(size), mode="bilinear", align_corners=False)


def _pixel_loss(logits: Tensor, classes: Tensor) -> Tensor:
    whole = resized_logits(logits, classes.shape[1:])
    nats = F.cross_entropy(whole, classes, ignore_index=NO_LABEL, reduction="sum")
    return nats / classes.numel()


def _kept(factory: Callable[[], nn.Module], kept: list[Tensor]) -> nn.Module:
    """Build a layer that appends the residual stream `[s, b, h]` that enters it.

    Before the layer runs, not in it: a recomputation in the backward pass must not append again.
    """
    layer = factory()
    names = cast(FeatureLayer, layer).core.carried_names

    def keep(_: nn.Module, entering: tuple[PackedState, ...]) -> None:
        kept.append(LayerState.unpack(entering[0], names).hidden)

    layer.register_forward_pre_hook(keep)
    return layer
