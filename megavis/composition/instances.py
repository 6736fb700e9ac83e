"""Fine-tuning of a paper's Vision Transformer to find objects: boxes, classes and masks.

"Exploring Plain Vision Transformer Backbones for Object Detection" (Li et al., 2022): blocks attend
within windows, a few to the whole image; the residual stream after the last block becomes a simple
pyramid, from which Mask R-CNN or its cascade finds objects (`model/detection.py`).

Legend: b images, S side of an image, s rows, h hidden size, g × g patches, k objects of an image
(0 where it has fewer), d detections of an image.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from megavis.composition.finetuned import Finetuned
from megavis.composition.model import Model
from megavis.composition.trainable import SequenceBatch, SumAndCount
from megavis.config.errors import UserError, blame
from megavis.data.codecs.instances import require_dense
from megavis.data.format.manifest import Manifest
from megavis.data.loading.loader import Batch
from megavis.model.core import Core
from megavis.model.dense import SimplePyramid
from megavis.model.flops import Workload, forward_flops
from megavis.model.layer_state import LayerState, PackedState
from megavis.model.parameters import set_start
from megavis.model.stack import LayerPlan
from megavis.model.windows import QueryPositions, Windows, in_windows, on_grid

if TYPE_CHECKING:
    from megavis.model.detection import Objects

NUM_LOSSES = 5
"""Losses of an image, `LOSSES` of `model/detection.py`."""
BLANK_OBJECTS = 32
"""Objects of a blank image, whose cost `megavis plan` counts."""
_NUM_PARTS = 3
"""Tensors that describe objects, in front of the inputs of the paper's first layer."""


class InstanceHead(nn.Module):
    """Simple pyramid and detector on the residual stream after the last block.

    Args:
        objects: classes, masks and sample indices, which the first layer puts there in every
            forward pass; the head clears it.
    """

    def __init__(
        self,
        core: Core,
        objects: list[tuple[Tensor, ...]],
        *,
        grid: tuple[int, int],
        num_classes: int,
        channels: int,
        patch_size: int,
        cascades: bool,
        regions: int,
    ) -> None:
        super().__init__()
        from megavis.model.detection import Detector

        self.core, self.grid, self.objects = core, grid, objects
        self.counts_all = False
        """Compute losses over the maximum number of regions: for `megavis plan`, on the meta
        device, where regions cannot be selected by value."""
        self.pyramid = SimplePyramid(core.megatron.hidden_size, channels)
        self.detector = Detector(
            channels,
            num_classes,
            patch_size=patch_size,
            side=patch_size * grid[0],
            cascades=cascades,
            regions=regions,
            seed=core.config.seed,
        )
        # The pretrained run has no head for these classes.
        set_start(self.parameters(), "fresh")

    def forward(self, state: PackedState) -> Any:
        """Map the `PackedState` of `[s, b, h]`, in raster order, to losses and detections.

        Returns:
            Losses float32 `[b, 5]`, zeros without objects; in evaluation also boxes `[b, d, 4]`,
            scores `[b, d]` and classes int64 `[b, d]`, both 0 beyond the last detection, and masks
            in [0, 1] `[b, d, 28, 28]`, each of its box.
        """
        hidden = LayerState.unpack(state, self.core.carried_names).hidden
        grids = hidden.permute(1, 2, 0).unflatten(2, self.grid)
        classes, masks, samples = self.objects.pop()
        levels = self.pyramid(grids)
        losses, found = [], []
        for image in range(len(grids)):
            own = [level[image : image + 1] for level in levels]
            if self.training or classes.shape[1]:
                parts = classes[image], masks[image], samples[image : image + 1]
                losses.append(self._losses(own, *parts))
            if not self.training:
                found.append(self.detector.detections(own))
        stacked = torch.stack(losses) if losses else grids.new_zeros(len(grids), NUM_LOSSES)
        return stacked.float() if self.training else (stacked.float(), *_padded(found))

    def _losses(
        self, levels: list[Tensor], classes: Tensor, masks: Tensor, sample: Tensor
    ) -> Tensor:
        if self.counts_all:
            return self.detector.fullest_losses(levels, _with_boxes(classes, masks))
        return self.detector.losses(levels, objects_of(classes, masks), sample)


def objects_of(classes: Tensor, masks: Tensor) -> Objects:
    """Return the objects of an image, with the box of each mask.

    Args:
        classes: int64 `[k]`, 0 for none.
        masks: uint8 `[k, S, S / 8]`, each bit a pixel, the leftmost first.
    """
    return _with_boxes(classes[classes > 0], masks[classes > 0])


def _with_boxes(classes: Tensor, masks: Tensor) -> Objects:
    bits = torch.arange(7, -1, -1, device=masks.device, dtype=torch.uint8)
    pixels = (masks[..., None] >> bits & 1).flatten(2)
    down, across = pixels.any(2), pixels.any(1)
    # Boxes end after their last pixel.
    edges = (_first(across), _first(down), _end(across), _end(down))
    boxes = torch.stack(edges, dim=1).float()
    return {"boxes": boxes, "labels": classes, "masks": pixels}


def _first(shown: Tensor) -> Tensor:
    return shown.to(torch.uint8).argmax(1)


def _end(shown: Tensor) -> Tensor:
    return shown.shape[1] - _first(shown.flip(1))


def _padded(found: list[Objects]) -> tuple[Tensor, ...]:
    """Stack the detections of images, filled with zeros to the most that one has."""
    names = ("boxes", "scores", "labels", "masks")
    parts = [[each[name] for each in found] for name in names]
    parts[-1] = [masks.squeeze(1) for masks in parts[-1]]
    return tuple(nn.utils.rnn.pad_sequence(part, batch_first=True) for part in parts)


class Instances(Finetuned):
    """A paper's model up to its last block, and a head that finds objects.

    Raises:
        UserError: an extra is missing, or the model's blocks do not attend to all patches.
    """

    def __init__(self, paper: Model) -> None:
        super().__init__(paper)
        with blame("finetune.task"):
            require_dense("instances")
        if self.backbone.core.visibility_kind != "full":
            raise UserError(
                f"is kept, and blocks of {self.config.objective.name} do not attend to all patches,"
                " as windows need; set it to full",
                key="finetune.visibility",
            )

    def check_data(self, manifest: Manifest) -> Iterator[str]:
        """Check that the shards are images with objects."""
        if manifest.target is None or manifest.target.kind != "instances":
            found = manifest.kind if manifest.target is None else f"{manifest.target.kind} maps"
            yield (
                f"holds {found}; finetune.task instances needs images with objects, which"
                " `data_tools maps instances` writes"
            )

    @property
    def global_blocks(self) -> tuple[int, ...]:
        """Numbers, from 1, of the blocks that attend to all patches; by default every quarter."""
        return self.settings.blocks_without_window(self.config.model.num_layers)

    def layer_plans(self) -> list[LayerPlan]:
        """Return the paper's layers up to its last block, and the head."""
        plans, objects = self.backbone.layer_plans(), list[tuple[Tensor, ...]]()
        blocks = [place for place, plan in enumerate(plans) if plan.stack is not None]
        # Blocks of a decoder belong to another stack.
        blocks = [place for place in blocks if plans[place].stack is plans[blocks[0]].stack]
        below = self.with_frozen(plans[: blocks[-1] + 1])
        first = torch.zeros(1, dtype=torch.int64)
        names = self.backbone.core.carried_names
        order = self.backbone.schedule.for_features(first).order
        factory = partial(_given_objects, on_grid(below[0].factory, names, order), objects)
        below[0] = dataclasses.replace(below[0], factory=factory)
        for number, place in enumerate(blocks, start=1):
            plan, reach = below[place], "all" if number in self.global_blocks else "window"
            below[place] = dataclasses.replace(
                plan, factory=self._attending(plan, number), variant=(*plan.variant, reach)
            )
        top = LayerPlan(
            "instances",
            partial(self._build_head, objects),
            self.config.seed,
            depth=below[-1].depth + 1,
            handed=objects,
        )
        return self.with_layer_decay([*below, top])

    def _attending(self, plan: LayerPlan, number: int) -> Any:
        """Return the factory of a block that attends to its window, or to all patches."""
        grid, side = self.backbone.reads.grid, self.settings.window
        windows = None
        if side is not None and number not in self.global_blocks:
            windows, grid = Windows(grid, side), (side, side)
        positions = None
        if self.settings.relative_positions:
            positions = partial(QueryPositions, grid, self.config.model.head_size)
        if windows is None and positions is None:
            return plan.factory
        return in_windows(plan.factory, windows, positions)

    def _build_head(self, objects: list[tuple[Tensor, ...]]) -> InstanceHead:
        grid = self.backbone.reads.grid
        return InstanceHead(
            self.backbone.core,
            objects,
            grid=grid,
            num_classes=self.settings.num_classes,
            channels=self.settings.width_of_head,
            patch_size=self.config.data.image_size // grid[0],
            cascades=self.settings.detector == "cascade",
            regions=self.settings.regions,
        )

    @property
    def takes_images_singly(self) -> bool:
        """True: each image has its own regions."""
        return True

    def fullest(self, build: Callable[[], nn.Module]) -> nn.Module:
        """Build the head so that losses are computed over the maximum number of regions."""
        head = build()
        assert isinstance(head, InstanceHead)
        head.counts_all = True
        return head

    def flops_per_image(self) -> float:
        """Return the FLOPs of a training step for one image, without the head's."""
        (height, width), side = self.backbone.reads.grid, self.settings.window
        whole, depth = height * width, self.config.model.num_layers
        num_global = len(self.global_blocks)
        mean = whole if side is None else (
            num_global * whole + (depth - num_global) * side**2
        ) / depth  # fmt: skip
        work = Workload(whole, whole, mean, whole, 0)
        return self.passes * forward_flops(self.config.model, work)

    def blank_batch(self, num_images: int, device: torch.device) -> Batch:
        """Return blank images with `BLANK_OBJECTS` objects each, whose masks are empty."""
        batch, side = super().blank_batch(num_images, device), self.config.data.image_size
        classes = torch.ones(num_images, BLANK_OBJECTS, dtype=torch.int64, device=device)
        masks = classes.new_zeros(*classes.shape, side, side // 8, dtype=torch.uint8)
        return dataclasses.replace(batch, objects=(classes, masks))

    def sequence(self, batch: Batch) -> SequenceBatch:
        """Return objects and the image's sequence for features; the targets are the objects."""
        if batch.objects is None:
            classes, masks = _none(batch.inputs)
        else:
            classes, masks = batch.objects
        parts = (classes, masks, batch.sample_index)
        return SequenceBatch((*parts, *self.backbone.feature_inputs(batch)), parts[:2])

    def inputs_from(
        self, inputs: Any, *, sample_index: Tensor | None = None, **options: Any
    ) -> tuple[Tensor, ...]:
        """Return `SequenceBatch.inputs` for images `[b, S, S, 3]`, without objects."""
        self.check_options(options)
        samples = torch.zeros(len(inputs), dtype=torch.int64, device=inputs.device)
        return (*_none(inputs), samples, *self.backbone.inputs_for_features(inputs, None))

    def loss(self, predictions: Any, targets: tuple[Tensor, ...]) -> Tensor:
        """Return the sum of an image's five losses, averaged over the images."""
        losses = predictions if isinstance(predictions, Tensor) else predictions[0]
        return losses.sum(1).mean()

    def measures(self, predictions: Any, targets: tuple[Tensor, ...]) -> Mapping[str, SumAndCount]:
        """Return the share of objects that the best detections find, as `accuracy`.

        Of an image with m objects, the m best detections count. One finds an object if the class is
        right and the IoU of the boxes at least 0.5. A quick measure; the average precision needs
        all images at once.
        """
        from torchvision.ops import box_iou

        _, boxes, scores, labels, _ = predictions
        found = total = 0
        for image, (classes, masks) in enumerate(zip(*targets, strict=True)):
            wanted = objects_of(classes, masks)
            count = len(wanted["labels"])
            best = (scores[image, :count] > 0).nonzero()[:, 0]
            overlaps = box_iou(wanted["boxes"], boxes[image, best])
            same = wanted["labels"][:, None] == labels[image, best]
            found, total = found + _num_found(torch.where(same, overlaps, 0.0)), total + count
        return {"accuracy": (torch.tensor(found, device=scores.device), total)}

    def outputs(self, predictions: Any) -> Tensor:
        """Return the scores of detections, `[b, d]`."""
        return cast(Tensor, predictions[2])


def _none(images: Tensor) -> tuple[Tensor, Tensor]:
    """Return classes `[b, 0]` and masks `[b, 0, S, S / 8]`."""
    count, side, device = len(images), images.shape[1], images.device
    classes = torch.zeros(count, 0, dtype=torch.int64, device=device)
    return classes, torch.zeros(count, 0, side, side // 8, dtype=torch.uint8, device=device)


def _num_found(overlaps: Tensor) -> int:
    """Count objects that detections find with an IoU of at least 0.5.

    Args:
        overlaps: IoU of objects and detections `[m, d]`, the best detection first.
    """
    left, count = overlaps.clone(), 0
    for detection in range(left.shape[1]):
        overlap, place = left[:, detection].max(0)
        if overlap >= 0.5:
            left[place], count = 0.0, count + 1
    return count


def _given_objects(build: Any, objects: list[tuple[Tensor, ...]]) -> nn.Module:
    """Build the first layer, which hands the objects among its inputs to the head."""
    layer: nn.Module = build()

    def take(_: nn.Module, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
        inputs = arguments[0]
        objects[:] = [tuple(inputs[:_NUM_PARTS])]
        return (tuple(inputs[_NUM_PARTS:]),)

    layer.register_forward_pre_hook(take)
    return layer
