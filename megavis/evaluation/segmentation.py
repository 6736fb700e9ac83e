"""Semantic segmentation: accuracy of pixels and intersection over union of classes.

All numbers come from one confusion matrix over the pixels of the whole set, as in ADE20K's and the
PASCAL VOC challenge's evaluation: the IoU of a class is the number of its correct pixels divided by
the number of pixels that have or were given it. Void pixels are ignored.

Images of any size are evaluated as in BEiT's recipe: the shorter side is resized to that of
training, windows of that side slide over the image, the logits of pixels in several windows are
averaged, and the mean is resized to the original before the class is chosen.

Legend: b images, H and W pixels, c classes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from megavis.composition.finetuned import NO_LABEL
from megavis.composition.segmentation import Segmentation, pixel_classes, resized_logits
from megavis.data.codecs.crops import resize
from megavis.data.codecs.jpeg import decode_png, decode_rgb, split
from megavis.data.codecs.label_maps import painted as paint
from megavis.data.loading.blended_dataset import Samples
from megavis.data.loading.dataset import ShardDataset
from megavis.data.loading.loader import evaluation_batches
from megavis.evaluation.results import PixelAccuracy
from megavis.model.inference import Inference
from megavis.parallel.progress_bar import shown

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_WINDOWS = 8
"""Windows of an image that are predicted at once."""


def accuracy_of(confusion: np.ndarray, num_images: int) -> PixelAccuracy:
    """Return the numbers of a confusion matrix, int64 `[c, c]`."""
    right = confusion.diagonal().astype(np.float64)
    true, given = confusion.sum(1), confusion.sum(0)
    union = true + given - confusion.diagonal()
    occurs, counts = true > 0, union > 0
    iou = np.divide(right, union, out=np.full(len(right), np.nan), where=counts)
    recall = right[occurs] / true[occurs]
    return PixelAccuracy(
        num_images=num_images,
        pixel_accuracy=float(right.sum() / max(1, true.sum())),
        mean_accuracy=float(recall.mean()) if occurs.any() else 0.0,
        mean_iou=float(iou[counts].mean()) if counts.any() else 0.0,
        iou=tuple(None if np.isnan(each) else float(each) for each in iou),
        confusion=tuple(map(tuple, confusion.tolist())),
    )


@torch.no_grad()
def evaluate_segmentation(
    inference: Inference, objective: Segmentation, dataset: Samples, *, batch_size: int
) -> PixelAccuracy:
    """Predict the classes of all pixels of a set.

    Collective over all processes of the job, whose data-parallel ranks divide the images.
    """
    context, num_classes = inference.context, objective.settings.num_classes
    # The confusion matrix, then the number of images.
    counts = torch.zeros(num_classes**2 + 1, dtype=torch.int64, device=context.device)
    for batch in evaluation_batches(
        dataset,
        batch_size=batch_size,
        data_parallel_rank=context.data.rank,
        data_parallel_size=context.data.size,
    ):
        sequence = objective.sequence(batch.to(context.device))
        logits = objective.outputs(inference.predictions(sequence.inputs))
        if batch.is_repeated:
            continue
        (classes,) = sequence.targets
        found = resized_logits(logits, classes.shape[1:]).argmax(1)
        counts[:-1] += confusion_of(found, classes, num_classes)
        counts[-1] += len(classes)
    dist.all_reduce(counts, group=context.data.group)
    confusion = counts[:-1].view(num_classes, num_classes).cpu().numpy()
    return accuracy_of(confusion, int(counts[-1]))


@torch.no_grad()
def plot_examples(
    inference: Inference, objective: Segmentation, dataset: Samples, *, title: str, count: int = 4
) -> Figure:
    """Plot images, their maps and the predicted ones; called on every process of the job.

    Classes have a colour each, and void is black.
    """
    from matplotlib.figure import Figure

    (batch, *_) = evaluation_batches(dataset, batch_size=count, limit=count)
    sequence = objective.sequence(batch.to(inference.context.device))
    logits = objective.outputs(inference.predictions(sequence.inputs))
    (classes,) = sequence.targets
    found = resized_logits(logits, classes.shape[1:]).argmax(1)
    maps = [torch.stack([each + 1] + 2 * [torch.zeros_like(each)], -1) for each in (classes, found)]
    painted = [paint(each.to(torch.uint8).cpu().numpy(), "panoptic") for each in maps]
    columns = {"image": batch.inputs[:, 0].cpu().numpy(), "classes": painted[0]}
    columns["predicted"] = painted[1]
    figure = Figure(figsize=(6.0, 2.0 * len(batch) + 0.6), dpi=120, layout="constrained")
    axes = figure.subplots(len(batch), len(columns), squeeze=False)
    for place, (name, pictures) in enumerate(columns.items()):
        axes[0, place].set_title(name, fontsize="small")
        for row, pixels in enumerate(pictures):
            axes[row, place].imshow(pixels, interpolation="nearest")
            axes[row, place].axis("off")
    figure.suptitle(title, fontsize="medium")
    return figure


@torch.no_grad()
def evaluate_originals(
    inference: Inference,
    objective: Segmentation,
    dataset: ShardDataset,
    *,
    stride: int,
    limit: int | None = None,
) -> PixelAccuracy:
    """Predict the classes of all pixels of images in their own size, by sliding windows.

    Collective over all processes of the job, whose data-parallel ranks divide the images.

    Args:
        stride: pixels between windows, at most the side of the training images.
        limit: maximum number of images, from the first.
    """
    context, num_classes = inference.context, objective.settings.num_classes
    counts = torch.zeros(num_classes**2 + 1, dtype=torch.int64, device=context.device)
    whole = len(dataset) if limit is None else min(limit, len(dataset))
    own = range(context.data.rank, whole, context.data.size)
    for index in shown(own, "segmentation", total=len(own), size=lambda _: 1):
        image, target = split(dataset.payload(index))
        logits = sliding_logits(inference, objective, decode_rgb(image), stride=stride)
        classes = pixel_classes(torch.from_numpy(decode_png(target))[None].to(context.device))
        found = resized_logits(logits, classes.shape[1:]).argmax(1)
        counts[:-1] += confusion_of(found, classes, num_classes)
        counts[-1] += 1
    dist.all_reduce(counts, group=context.data.group)
    confusion = counts[:-1].view(num_classes, num_classes).cpu().numpy()
    return accuracy_of(confusion, int(counts[-1]))


def sliding_logits(
    inference: Inference, objective: Segmentation, image: np.ndarray, *, stride: int
) -> Tensor:
    """Return mean logits `[1, c, H, W]` of an image uint8 `[h, w, 3]`, its shorter side resized.

    Windows begin every `stride` pixels; the last one of a row or column ends with the image.
    """
    side, (height, width) = objective.config.data.image_size, image.shape[:2]
    scale = side / min(height, width)
    # Rounding must not make a side shorter than a window.
    rows, columns = (max(side, round(scale * length)) for length in (height, width))
    pixels = torch.from_numpy(resize(image, height=rows, width=columns))
    device, num_classes = inference.context.device, objective.settings.num_classes
    sums = torch.zeros(1, num_classes, rows, columns, device=device)
    counts = torch.zeros(rows, columns, device=device)
    places = [
        (slice(top, top + side), slice(left, left + side))
        for top in _starts(rows, side, stride)
        for left in _starts(columns, side, stride)
    ]
    for first in range(0, len(places), _WINDOWS):
        batch = places[first : first + _WINDOWS]
        windows = torch.stack([pixels[place] for place in batch])
        logits = objective.outputs(inference.predictions(objective.inputs_from(windows.to(device))))
        for place, own in zip(batch, resized_logits(logits, windows.shape[1:3]), strict=True):
            sums[0, :, *place] += own
            counts[place] += 1
    return sums / counts


def _starts(length: int, side: int, stride: int) -> list[int]:
    """Return where windows begin along a side."""
    return [*range(0, length - side, stride), length - side]


def confusion_of(found: Tensor, classes: Tensor, num_classes: int) -> Tensor:
    """Count pixels by class and predicted class, both int64 `[b, H, W]`: int64 `[c²]`."""
    valid = classes != NO_LABEL
    cells = classes[valid] * num_classes + found[valid]
    return torch.bincount(cells, minlength=num_classes**2)
