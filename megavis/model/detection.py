"""Detection on a pyramid of features: torchvision's networks and losses, one image at a time.

Mask R-CNN (He et al., 2017) in the form of "Exploring Plain Vision Transformer Backbones for Object
Detection" (Li et al., 2022), section 4: two convolutions in the region proposal network, four
convolutions and a linear layer in the box head, norms over channels. `Cascade` adds "Cascade R-CNN"
(Cai and Vasconcelos, 2018), which torchvision lacks. Imports torchvision, an extra.

Two things differ from torchvision's `MaskRCNN`. Anchors and proposals are sampled for the losses by
seed and sample, and each image has its own loss, so neither depends on the batch. Boxes are float32
at any precision of the weights.

Legend: m objects of an image, r proposals, c classes without background, S side of the image.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchvision.models.detection.anchor_utils import AnchorGenerator
from torchvision.models.detection.faster_rcnn import FastRCNNConvFCHead, FastRCNNPredictor
from torchvision.models.detection.image_list import ImageList
from torchvision.models.detection.mask_rcnn import MaskRCNNHeads, MaskRCNNPredictor
from torchvision.models.detection.roi_heads import (
    RoIHeads,
    fastrcnn_loss,
    maskrcnn_inference,
    maskrcnn_loss,
)
from torchvision.models.detection.rpn import (
    RegionProposalNetwork,
    RPNHead,
    concat_box_prediction_layers,
)
from torchvision.ops import MultiScaleRoIAlign, box_iou, clip_boxes_to_image, roi_align

from megavis.model.dense import ChannelNorm
from megavis.parallel.random import uniform

Features = Mapping[str, Tensor]
"""Levels float32 `[1, w, ...]` of one image by name, the largest first."""
Objects = Mapping[str, Tensor]
"""Objects of one image: `boxes` float32 `[m, 4]` (left, top, right, bottom in pixels), `labels`
int64 `[m]` from 1, `masks` uint8 `[m, S, S]`. Detections also have `scores`, and their masks are
`[m, 1, 28, 28]`."""

LOSSES = (
    "loss_objectness",
    "loss_rpn_box_reg",
    "loss_classifier",
    "loss_box_reg",
    "loss_mask",
)
"""Names of torchvision's losses; a cascade's are sums over its stages."""
MAX_DETECTIONS = 100
"""Most detections of an image, as in COCO's evaluation."""
MASK_SIDE = 28
"""Side of a predicted mask, which covers its box."""

_POOLED = ("0", "1", "2", "3")
"""Levels from which regions are pooled; the region proposal network reads one more."""
_RATIOS = (0.5, 1.0, 2.0)
_CASCADE = (0.5, 0.6, 0.7)
"""IoU with an object above which a stage's box counts as that object."""
_CASCADE_WEIGHTS = ((10.0, 10.0, 5.0, 5.0), (20.0, 20.0, 10.0, 10.0), (30.0, 30.0, 15.0, 15.0))
"""Scales of the offsets that a stage predicts, in detectron2's code of ViTDet."""
_NUM_ANCHORS, _ANCHOR_SHARE = 256, 0.5
"""Anchors sampled for the loss, and the largest share of them that are objects."""
_REGION_SHARE = 0.25
"""The same share of proposals."""
_NORM = partial(ChannelNorm, eps=1e-6)
_HIDDEN = 4
"""Width of the box head's linear layer, in multiples of its convolutions': 1,024 for 256."""


class SeededSampler:
    """Chooses anchors or proposals as torchvision's sampler does, by draws of seed and sample.

    Args:
        count: largest number to choose.
        fraction: largest share of them that are objects.
        purpose: name of the draws.
    """

    def __init__(self, count: int, fraction: float, *, seed: int, purpose: str) -> None:
        self.count, self.fraction = count, fraction
        self.seed, self.purpose = seed, purpose
        self.sample: Tensor | None = None
        """int64 `[1]`, the sample whose anchors are chosen next."""

    def __call__(self, labels: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        """Return which objects and which others are chosen, bool `[r]` each in lists of one.

        Args:
            labels: labels of one image, `[r]`: > 0 for an object, 0 for background, < 0 ignored.
        """
        (own,) = labels
        assert self.sample is not None
        draws = uniform(self.sample, len(own), seed=self.seed, purpose=self.purpose)[0]
        objects, others = own >= 1, own == 0
        wanted = min(int(self.count * self.fraction), int(objects.sum()))
        rest = min(self.count - wanted, int(others.sum()))
        return [_first(objects, draws, wanted)], [_first(others, draws, rest)]


def _first(among: Tensor, draws: Tensor, count: int) -> Tensor:
    """Return bool `[r]`, true for the `count` of `among` with the smallest draws."""
    order = torch.where(among, draws, 2.0).sort(stable=True).indices[:count]
    return torch.zeros_like(among).index_fill(0, order, True)


class AgnosticPredictor(FastRCNNPredictor):
    """Class logits and one box for all classes, in the form of a box for each class."""

    def __init__(self, width: int, num_classes: int) -> None:
        super().__init__(width, num_classes)
        self.bbox_pred = nn.Linear(width, 4)

    def forward(self, pooled: Tensor) -> tuple[Tensor, Tensor]:
        """Map `[r, ...]` to logits `[r, c + 1]` and offsets `[r, 4 (c + 1)]`."""
        logits, offsets = super().forward(pooled)
        return logits, offsets.repeat(1, logits.shape[1])


class Cascade(nn.Module):
    """Stages that classify and refine the previous stage's boxes; the last boxes get masks.

    "Cascade R-CNN: Delving into High Quality Object Detection" (Cai and Vasconcelos, 2018), in the
    form of detectron2's code: scores are averaged over the stages; only the first stage samples
    proposals, on which masks are trained; features get the stages' mean gradient. With one stage it
    is torchvision's `RoIHeads`.

    Args:
        stages: each with its box head, whose offsets are the same for all classes, and the first
            with the mask head.
    """

    def __init__(self, stages: Sequence[RoIHeads]) -> None:
        super().__init__()
        self.stages = nn.ModuleList(stages)

    def forward(
        self,
        features: Features,
        proposals: list[Tensor],
        image_shapes: list[tuple[int, int]],
        targets: list[Objects] | None = None,
    ) -> tuple[list[dict[str, Tensor]], dict[str, Tensor]]:
        """Return detections and losses of one image, as `RoIHeads` does."""
        if self.training:
            assert targets is not None
            return [], self._losses(features, proposals, image_shapes, targets)
        return self._detections(features, proposals, image_shapes), {}

    def _losses(
        self,
        features: Features,
        proposals: list[Tensor],
        shapes: list[tuple[int, int]],
        targets: list[Objects],
    ) -> dict[str, Tensor]:
        first: Any = self.stages[0]
        chosen, matched, labels, offsets = first.select_training_samples(proposals, targets)
        positive = labels[0] > 0
        inside, of_objects = [chosen[0][positive]], [matched[0][positive]]
        losses: dict[str, Tensor] = {}
        for number, stage in enumerate(self.stages):
            if number:
                labels, offsets = _matched(stage, chosen, targets)
            logits, found = self.boxes(stage, features, chosen, shapes)
            of_class, of_box = fastrcnn_loss(logits, found, labels, offsets)
            for name, loss in (("loss_classifier", of_class), ("loss_box_reg", of_box)):
                losses[name] = losses.get(name, 0.0) + loss
            chosen = _refined(stage, found, chosen, shapes)
        masks = self._masks(features, inside, shapes)
        wanted = [[each[name] for each in targets] for name in ("masks", "labels")]
        losses["loss_mask"] = maskrcnn_loss(masks, inside, *wanted, of_objects)
        return losses

    def _detections(
        self, features: Features, proposals: list[Tensor], shapes: list[tuple[int, int]]
    ) -> list[dict[str, Tensor]]:
        shares = []
        for number, stage in enumerate(self.stages):
            logits, found = self.boxes(stage, features, proposals, shapes)
            shares.append(logits.softmax(-1))
            if number + 1 < len(self.stages):
                proposals = _refined(stage, found, proposals, shapes)
        last: Any = self.stages[-1]
        # Logits whose softmax is the mean of the scores.
        mean = torch.stack(shares).mean(0).log()
        boxes, scores, labels = last.postprocess_detections(mean, found, proposals, shapes)
        masks = maskrcnn_inference(self._masks(features, boxes, shapes), labels)
        parts = {"boxes": boxes, "scores": scores, "labels": labels, "masks": masks}
        return [{name: each[0] for name, each in parts.items()}]

    def boxes(
        self, stage: Any, features: Features, boxes: list[Tensor], shapes: list[tuple[int, int]]
    ) -> tuple[Tensor, Tensor]:
        """Return a stage's logits `[r, c + 1]` and offsets `[r, 4 (c + 1)]` of boxes `[r, 4]`."""
        pooled = stage.box_roi_pool(features, boxes, shapes)
        # Features get the mean gradient of the stages, not the sum.
        share = 1.0 / len(self.stages)
        pooled = share * pooled + (1.0 - share) * pooled.detach()
        logits, offsets = stage.box_predictor(stage.box_head(pooled))
        return logits, offsets

    def _masks(
        self, features: Features, boxes: list[Tensor], shapes: list[tuple[int, int]]
    ) -> Tensor:
        first: Any = self.stages[0]
        pooled = first.mask_roi_pool(features, boxes, shapes)
        logits: Tensor = first.mask_predictor(first.mask_head(pooled))
        return logits


def _matched(
    stage: Any, boxes: list[Tensor], targets: list[Objects]
) -> tuple[list[Tensor], tuple[Tensor, ...]]:
    """Return the class of each box by a stage's IoU, and the offsets to its object."""
    objects, classes = ([each[name] for each in targets] for name in ("boxes", "labels"))
    matched, labels = stage.assign_targets_to_proposals(boxes, objects, classes)
    # Without objects all boxes are background, whose offsets are ignored.
    known = objects[0] if len(objects[0]) else objects[0].new_zeros(1, 4)
    return labels, stage.box_coder.encode([known[matched[0]]], boxes)


def _refined(
    stage: Any, offsets: Tensor, boxes: list[Tensor], shapes: list[tuple[int, int]]
) -> list[Tensor]:
    """Return the boxes `[r, 4]` that a stage has found, as proposals: without a gradient."""
    found = stage.box_coder.decode(offsets.detach(), boxes)[:, 0]
    return [clip_boxes_to_image(found, shapes[0])]


class Detector(nn.Module):
    """Proposals, boxes and masks from a pyramid.

    Args:
        channels: width w of the pyramid's levels and of all heads.
        patch_size: pixels of a cell of the third level, a power of two.
        side: S.
        cascades: refine boxes in three stages.
        regions: proposals drawn for the losses.
        seed: the run's seed.
    """

    def __init__(
        self,
        channels: int,
        num_classes: int,
        *,
        patch_size: int,
        side: int,
        cascades: bool,
        regions: int,
        seed: int,
    ) -> None:
        super().__init__()
        self.shapes, self.num_regions = [(side, side)], regions
        self.proposals = _proposals(channels, patch_size)
        thresholds = _CASCADE if cascades else (0.5,)
        stages = [
            _stage(channels, num_classes, patch_size, number, regions, is_agnostic=cascades)
            for number in range(len(thresholds))
        ]
        self.heads: nn.Module = Cascade(stages) if cascades else stages[0]
        # In order of use, each with its own draws.
        self.samplers = [
            SeededSampler(_NUM_ANCHORS, _ANCHOR_SHARE, seed=seed, purpose="anchors"),
            SeededSampler(regions, _REGION_SHARE, seed=seed, purpose="proposals"),
        ]
        self.proposals.fg_bg_sampler, stages[0].fg_bg_sampler = self.samplers
        for module in self.modules():
            if isinstance(module, _COMPUTE_IN_WEIGHTS):
                module.register_forward_pre_hook(_to_weights)
                module.register_forward_hook(_to_float)

    def losses(self, levels: Sequence[Tensor], objects: Objects, sample: Tensor) -> Tensor:
        """Return the losses `LOSSES` of one image, float32 `[5]`.

        Args:
            levels: `[1, w, ...]`, five.
            sample: int64 `[1]`, on which draws depend.
        """
        for sampler in self.samplers:
            sampler.sample = sample
        _, found = self._run(levels, [objects])
        return torch.stack([found[name] for name in LOSSES])

    def fullest_losses(self, levels: Sequence[Tensor], objects: Objects) -> Tensor:
        """Return the sum of losses `[1]` of one image with the maximum number of regions.

        Runs `losses` on the meta device, where regions cannot be selected by value: the first ones
        are taken. The first quarter of the proposals are objects, and regions are spread evenly
        over the levels of the pyramid.

        Args:
            levels: `[1, w, ...]`, five.
            objects: at least one object.
        """
        features = {str(place): level.float() for place, level in enumerate(levels)}
        boxes, loss = self._fullest_proposals(features, objects)
        stages = self.heads.stages if isinstance(self.heads, Cascade) else [self.heads]
        count = int(_REGION_SHARE * self.num_regions)
        rows, classes = torch.arange(count, device=boxes.device), objects["labels"][:1]
        labels, inside = classes.expand(self.num_regions), boxes[:count]
        for stage in stages:
            logits, offsets = self._of_stage(stage, features, boxes)
            offsets = offsets.unflatten(1, (-1, 4))[rows, labels[:count]]
            loss = loss + F.cross_entropy(logits, labels)
            loss = loss + F.smooth_l1_loss(offsets, inside, reduction="sum")
        first: Any = stages[0]
        pooled = first.mask_roi_pool(features, [inside], self.shapes)
        masks = first.mask_predictor(first.mask_head(pooled))
        wanted = torch.cat([rows[:, None].to(inside), inside], dim=1)
        shown = roi_align(objects["masks"][:, None].to(wanted), wanted, MASK_SIDE)[:, 0]
        loss = loss + F.binary_cross_entropy_with_logits(masks[rows, labels[:count]], shown)
        return loss[None]

    def _of_stage(self, stage: Any, features: Features, boxes: Tensor) -> tuple[Tensor, Tensor]:
        if isinstance(self.heads, Cascade):
            return self.heads.boxes(stage, features, [boxes], self.shapes)
        pooled = stage.box_roi_pool(features, [boxes], self.shapes)
        logits, offsets = stage.box_predictor(stage.box_head(pooled))
        return logits, offsets

    def _fullest_proposals(self, features: Features, objects: Objects) -> tuple[Tensor, Tensor]:
        """Return the maximum number of proposals `[r, 4]`, and the losses of as many anchors."""
        network, levels = self.proposals, [*features.values()]
        scores, offsets = concat_box_prediction_layers(*network.head(levels))
        images = ImageList(levels[0].new_empty(1).expand(1, 3, *self.shapes[0]), self.shapes)
        (anchors,) = network.anchor_generator(images, levels)
        found = network.box_coder.decode(offsets.detach(), [anchors])[:, 0]
        overlaps = box_iou(objects["boxes"], anchors)
        matched = objects["boxes"][overlaps.max(0).indices]
        wanted = network.box_coder.encode([matched], [anchors])[0]
        chosen = torch.arange(_NUM_ANCHORS, device=found.device)
        inside = chosen[: int(_ANCHOR_SHARE * _NUM_ANCHORS)]
        loss = F.smooth_l1_loss(offsets[inside], wanted[inside], reduction="sum")
        labels = scores.new_ones(_NUM_ANCHORS)
        loss = loss + F.binary_cross_entropy_with_logits(scores.flatten()[chosen], labels)
        return found.new_empty(self.num_regions, 4), loss

    def detections(self, levels: Sequence[Tensor]) -> Objects:
        """Return at most `MAX_DETECTIONS` detections of one image, the best first."""
        (found,), _ = self._run(levels, None)
        return found

    def _run(
        self, levels: Sequence[Tensor], targets: list[Objects] | None
    ) -> tuple[Any, dict[str, Tensor]]:
        # In torchvision's modules this only selects between losses and detections: none has dropout
        # or running statistics.
        self.train(targets is not None)
        features = {str(place): level.float() for place, level in enumerate(levels)}
        # Only the shape is read.
        images = ImageList(levels[0].new_empty(1).expand(1, 3, *self.shapes[0]), self.shapes)
        boxes, losses = self.proposals(images, features, targets)
        found, of_heads = self.heads(features, boxes, self.shapes, targets)
        return found, {**losses, **of_heads}


_COMPUTE_IN_WEIGHTS = (
    RPNHead,
    FastRCNNConvFCHead,
    FastRCNNPredictor,
    MaskRCNNHeads,
    MaskRCNNPredictor,
)
"""Networks that compute in the precision of their weights; everything else is in float32."""


def _to_weights(module: nn.Module, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    dtype = next(module.parameters()).dtype
    return tuple(_cast(each, dtype) for each in arguments)


def _to_float(_: nn.Module, __: Any, output: Any) -> Any:
    return _cast(output, torch.float32)


def _cast(value: Any, dtype: torch.dtype) -> Any:
    if isinstance(value, Tensor):
        return value.to(dtype)
    return type(value)(_cast(each, dtype) for each in value)


def _proposals(channels: int, patch_size: int) -> RegionProposalNetwork:
    """Return the region proposal network of detectron2's Mask R-CNN, with two convolutions."""
    # Anchors of 32 to 512 pixels for patches of 16.
    sizes = tuple((2 * patch_size * 2**level,) for level in range(len(_POOLED) + 1))
    anchors = AnchorGenerator(sizes, (_RATIOS,) * len(sizes))
    return RegionProposalNetwork(
        anchors,
        RPNHead(channels, len(_RATIOS), conv_depth=2),
        fg_iou_thresh=0.7,
        bg_iou_thresh=0.3,
        batch_size_per_image=_NUM_ANCHORS,
        positive_fraction=_ANCHOR_SHARE,
        pre_nms_top_n={"training": 2000, "testing": 1000},
        post_nms_top_n={"training": 1000, "testing": 1000},
        nms_thresh=0.7,
    )


def _stage(
    channels: int,
    num_classes: int,
    patch_size: int,
    number: int,
    regions: int,
    *,
    is_agnostic: bool,
) -> RoIHeads:
    """Return a stage of boxes, the first with masks; torchvision counts background as class 0."""
    hidden, predictor = _HIDDEN * channels, AgnosticPredictor if is_agnostic else FastRCNNPredictor
    box_head = FastRCNNConvFCHead((channels, 7, 7), [channels] * 4, [hidden], _NORM)
    masks: dict[str, nn.Module] = {}
    if number == 0:
        masks = {
            "mask_roi_pool": _pool(MASK_SIDE // 2, patch_size),
            "mask_head": MaskRCNNHeads(channels, [channels] * 4, 1, _NORM),
            "mask_predictor": MaskRCNNPredictor(channels, channels, num_classes + 1),
        }
    return RoIHeads(
        _pool(7, patch_size),
        box_head,
        predictor(hidden, num_classes + 1),
        fg_iou_thresh=_CASCADE[number],
        bg_iou_thresh=_CASCADE[number],
        batch_size_per_image=regions,
        positive_fraction=_REGION_SHARE,
        bbox_reg_weights=_CASCADE_WEIGHTS[number],
        score_thresh=0.05,
        nms_thresh=0.5,
        detections_per_img=MAX_DETECTIONS,
        **masks,
    )


class _Pool(MultiScaleRoIAlign):
    """Pooling of regions from the levels that fit their sizes; evenly from all on `meta`."""

    def forward(
        self, x: dict[str, Tensor], boxes: list[Tensor], image_shapes: list[tuple[int, int]]
    ) -> Tensor:
        """Map levels `[1, w, ...]` and boxes `[r, 4]` of an image to `[r, w, side, side]`."""
        if not boxes[0].is_meta:
            pooled: Tensor = super().forward(x, boxes, image_shapes)
            return pooled
        (own,), levels = boxes, [x[name] for name in self.featmap_names]
        regions = torch.cat([own[:, :1], own], dim=1)
        result = own.new_zeros(len(own), levels[0].shape[1], *self.output_size)
        places = torch.arange(len(own), device=own.device).chunk(len(levels))
        for level, place in zip(levels, places, strict=True):
            result[place] = roi_align(level, regions[place], self.output_size)
        return result


def _pool(side: int, patch_size: int) -> MultiScaleRoIAlign:
    """Return a pooling whose boxes of 224 pixels are read from the grid of patches of 16."""
    return _Pool(
        list(_POOLED),
        side,
        sampling_ratio=0,
        canonical_scale=14 * patch_size,
        canonical_level=int(math.log2(patch_size)),
    )
