"""Detection: average precision of boxes and masks, by COCO's own code.

Images of any size are resized and padded as in validation, and boxes and masks are taken back to
the original before they are compared. pycocotools counts them on the main process, over all
images: twelve numbers each, and the average precision of every class.

Legend: b images, S side of an image for the model, d detections of an image, h and w its original
height and width.
"""

from __future__ import annotations

import contextlib
import io
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from megavis.composition.instances import Instances
from megavis.config.errors import UserError
from megavis.data.codecs.instances import masks_of, read_objects
from megavis.data.codecs.jpeg import decode_rgb, split
from megavis.data.codecs.transforms import Transform
from megavis.data.loading.dataset import ShardDataset, Subset
from megavis.evaluation.results import AveragePrecision, DetectionAccuracy
from megavis.model.inference import Inference
from megavis.parallel.progress_bar import shown

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_NUMBERS = (
    *("ap", "ap50", "ap75", "ap_small", "ap_medium", "ap_large"),
    *("ar1", "ar10", "ar100", "ar_small", "ar_medium", "ar_large"),
)
"""COCO's twelve metrics, in its order."""
_INSIDE = 0.5
"""Probability above which a pixel belongs to a mask."""


@dataclass(frozen=True)
class Found:
    """The detections of an image in its original size, the best first.

    Attributes:
        boxes: float32 `[d, 4]`: left, top, width and height in pixels.
        scores: `[d]`, in [0, 1].
        classes: int64 `[d]`, from 1.
        masks: COCO's compressed run lengths.
    """

    boxes: np.ndarray
    scores: np.ndarray
    classes: np.ndarray
    masks: tuple[str, ...]


@torch.no_grad()
def evaluate_detection(
    inference: Inference,
    objective: Instances,
    dataset: ShardDataset | Subset,
    *,
    batch_size: int,
    limit: int | None = None,
) -> DetectionAccuracy:
    """Find the objects of a set and compare them with its annotations.

    Collective over all processes of the job, whose data-parallel ranks divide the images.

    Args:
        limit: maximum number of images, from the first.

    Raises:
        UserError: there is no image.
    """
    context, count = inference.context, min(limit or len(dataset), len(dataset))
    if not count:
        raise UserError(f"{dataset.directory} has no images to evaluate")
    own: list[tuple[int, dict[str, Any], Found]] = []
    # All ranks run the same number of passes, as ZeRO-3 requires; surplus images are not counted.
    span = batch_size * context.data.size
    starts = range(context.data.rank * batch_size, span * -(-count // span), span)
    for start in shown(
        starts, "detection", total=len(starts) * batch_size, size=lambda _: batch_size
    ):
        places = range(start, start + batch_size)
        payloads = [_payload(dataset, min(place, count - 1)) for place in places]
        found = detect(inference, objective, [decode_rgb(image) for image, _ in payloads])
        for place, (_, target), each in zip(places, payloads, found, strict=True):
            if place < count:
                own.append((place, read_objects(target), each))
    parts: list[Any] = [None] * context.data.size
    dist.all_gather_object(parts, own, group=context.data.group)
    whole = sorted((each for part in parts for each in part), key=lambda each: each[0])
    num_classes = objective.settings.num_classes
    result: DetectionAccuracy = context.on_main(lambda: accuracy_of(whole, num_classes))
    return result


def _payload(dataset: ShardDataset | Subset, place: int) -> tuple[bytes, bytes]:
    if isinstance(dataset, Subset):
        return split(dataset.dataset.payload(int(dataset.indices[place])))
    return split(dataset.payload(place))


def detect(inference: Inference, objective: Instances, images: Sequence[np.ndarray]) -> list[Found]:
    """Find objects in images uint8 `[h, w, 3]` of any sizes."""
    side, device = objective.config.data.image_size, inference.context.device
    fit = Transform(side, "fitted", fits=True)
    draws = fit.draws(np.zeros(len(images), np.int64))
    pixels = np.stack([fit(image, draw) for image, draw in zip(images, draws, strict=True)])
    inputs = objective.inputs_from(torch.from_numpy(pixels).to(device))
    _, *parts = inference.predictions(inputs)
    return [
        _in_original(image.shape[:2], side, *own)
        for image, *own in zip(images, *parts, strict=True)
    ]


def _in_original(
    size: tuple[int, ...], side: int, boxes: Tensor, scores: Tensor, labels: Tensor, masks: Tensor
) -> Found:
    """Take detections of a padded square of `side` pixels back to an image of h and w."""
    from pycocotools import mask as coco
    from torchvision.models.detection.roi_heads import paste_masks_in_image
    from torchvision.ops import clip_boxes_to_image

    height, width = size
    scale = side / max(size)
    # Round to whole pixels, as in resizing images.
    down, across = (length / max(1, round(length * scale)) for length in size)
    boxes = boxes * boxes.new_tensor([across, down, across, down])
    boxes = clip_boxes_to_image(boxes, (height, width))
    # Drop boxes in the padding, and empty ones.
    has_area = (boxes[:, 2:] > boxes[:, :2]).all(1) & (scores > 0)
    boxes, scores, labels, masks = (each[has_area].cpu() for each in (boxes, scores, labels, masks))
    lengths = []
    for box, mask in zip(boxes, masks, strict=True):
        # One mask at a time: a hundred masks of a photograph's size take 100 MB.
        pasted = paste_masks_in_image(mask[None, None], box[None], (height, width))
        inside = (pasted[0, 0] > _INSIDE).to(torch.uint8).numpy()
        lengths.append(coco.encode(np.asfortranarray(inside))["counts"].decode())
    corners = boxes.numpy().astype(np.float64)
    corners[:, 2:] -= corners[:, :2]
    return Found(corners, scores.numpy(), labels.numpy(), tuple(lengths))


def accuracy_of(
    images: Sequence[tuple[int, dict[str, Any], Found]], num_classes: int
) -> DetectionAccuracy:
    """Return COCO's numbers for images with their annotations and detections."""
    parts = [_precision(images, num_classes, kind) for kind in ("bbox", "segm")]
    return DetectionAccuracy(len(images), *parts)


def _precision(
    images: Sequence[tuple[int, dict[str, Any], Found]],
    num_classes: int,
    kind: Literal["bbox", "segm"],
) -> AveragePrecision:
    from pycocotools.coco import COCO
    from pycocotools.cocoeval import COCOeval

    listed = [
        {"id": number, "height": each["size"][0], "width": each["size"][1]}
        for number, each, _ in images
    ]
    categories = [{"id": number, "name": str(number)} for number in range(1, num_classes + 1)]
    notes = [_annotated(images), _detected(images, kind)]
    # pycocotools prints its progress.
    with contextlib.redirect_stdout(io.StringIO()):
        sets = []
        for own in notes:
            each = COCO()
            each.dataset = {"images": listed, "annotations": own, "categories": categories}
            each.createIndex()
            sets.append(each)
        counted = COCOeval(*sets, kind)
        counted.evaluate()
        counted.accumulate()
        counted.summarize()
    # By IoU, recall, class, area and number of detections; -1 where there is no object.
    precision = counted.eval["precision"][:, :, :, 0, -1]
    numbers = dict(zip(_NUMBERS, map(_number, counted.stats.tolist()), strict=True))
    by_class = tuple(_number(_mean(precision[:, :, place])) for place in range(num_classes))
    return AveragePrecision(**numbers, by_class=by_class)


def _mean(values: np.ndarray) -> float:
    known = values[values > -1]
    return float(known.mean()) if known.size else -1.0


def _number(value: float) -> float | None:
    return None if value < 0 else float(value)


def _annotated(images: Sequence[tuple[int, dict[str, Any], Found]]) -> list[dict[str, Any]]:
    objects = [(number, each["size"], own) for number, each, _ in images for own in each["objects"]]
    return [
        {
            "id": place,
            "image_id": number,
            "category_id": own["class"],
            "bbox": own["box"],
            "area": own["area"],
            "iscrowd": own["crowd"],
            "segmentation": {"size": size, "counts": own["mask"]},
        }
        for place, (number, size, own) in enumerate(objects, start=1)
    ]


def _detected(
    images: Sequence[tuple[int, dict[str, Any], Found]], kind: Literal["bbox", "segm"]
) -> list[dict[str, Any]]:
    from pycocotools import mask as coco

    notes: list[dict[str, Any]] = []
    for number, annotation, found in images:
        parts = (found.boxes.tolist(), found.scores.tolist(), found.classes.tolist(), found.masks)
        for box, score, label, lengths in zip(*parts, strict=True):
            mask = {"size": annotation["size"], "counts": lengths}
            # As in COCO's `loadRes`: the area of the mask or box that is compared.
            area = box[2] * box[3] if kind == "bbox" else float(coco.area(mask))
            notes.append(
                {
                    "id": len(notes) + 1,
                    "image_id": number,
                    "category_id": label,
                    "bbox": box,
                    "area": area,
                    "iscrowd": 0,
                    "score": score,
                    "segmentation": mask,
                }
            )
    return notes


@torch.no_grad()
def plot_examples(
    inference: Inference,
    objective: Instances,
    dataset: ShardDataset | Subset,
    class_names: Sequence[str],
    *,
    title: str,
    count: int = 4,
) -> Figure:
    """Draw images with their objects, and with as many detections, the best, and their scores.

    Collective over all processes of the job.
    """
    from matplotlib.figure import Figure

    count = min(count, len(dataset))
    payloads = [_payload(dataset, place) for place in range(count)]
    images = [decode_rgb(image) for image, _ in payloads]
    found = detect(inference, objective, images)
    figure = Figure(figsize=(6.4, 3.2 * count + 0.6), dpi=120, layout="constrained")
    axes = figure.subplots(count, 2, squeeze=False)
    for row, (image, (_, target), each) in enumerate(zip(images, payloads, found, strict=True)):
        objects = read_objects(target)["objects"]
        best = range(min(len(objects), len(each.scores)))
        guesses = [
            {"class": int(each.classes[n]), "box": each.boxes[n].tolist(), "mask": each.masks[n]}
            for n in best
        ]
        scores = [f" {each.scores[n]:.0%}" for n in best]
        _draw(axes[row, 0], image, objects, class_names, [""] * len(objects))
        _draw(axes[row, 1], image, guesses, class_names, scores)
    for axis, name in zip(axes[0], ("annotated", "found, with scores"), strict=True):
        axis.set_title(name, fontsize="small")
    figure.suptitle(title, fontsize="medium")
    return figure


def _draw(
    axis: Axes,
    image: np.ndarray,
    objects: Sequence[dict[str, Any]],
    class_names: Sequence[str],
    notes: Sequence[str],
) -> None:
    """Draw an image with objects; notes follow the names of their classes."""
    from matplotlib import colormaps
    from matplotlib.patches import Rectangle

    shown_image = image.astype(np.float32) / 255.0
    masks = _masks(image, objects)
    for place, (each, mask, note) in enumerate(zip(objects, masks, notes, strict=True)):
        tone = np.array(colormaps["tab20"](place % 20)[:3])
        shown_image = np.where(mask[..., None] > 0, 0.5 * shown_image + 0.5 * tone, shown_image)
        left, top, width, height = each["box"]
        axis.add_patch(Rectangle((left, top), width, height, fill=False, edgecolor=tone))
        name = class_names[each["class"] - 1] + note
        style: dict[str, Any] = {"fontsize": "x-small", "backgroundcolor": (*tone, 0.7)}
        axis.text(left, top, name, color="white", **style)
    axis.imshow(shown_image)
    axis.axis("off")


def _masks(image: np.ndarray, objects: Sequence[dict[str, Any]]) -> np.ndarray:
    if not objects:
        return np.zeros((0, *image.shape[:2]), np.uint8)
    return masks_of(image.shape[:2], objects).transpose(2, 0, 1)
