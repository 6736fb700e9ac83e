"""`megavis likelihood`, `ensemble`, `evaluate segmentation` and `evaluate detection`.

They evaluate what a run predicts for held-out images: their likelihood or classes, the classes of
the pixels of whole images, or boxes and masks of the objects in them.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TypeVar

from megavis.checkpoint.format.folder import chosen_checkpoint, finetuned_step, finetuning_file
from megavis.checkpoint.format.manifest import read_manifest
from megavis.commands.opening import (
    first_images,
    job_closed,
    layout_job,
    open_run,
    open_shards,
    open_unseen,
)
from megavis.commands.options.shared import result_place
from megavis.composition.classification import classifier_of
from megavis.composition.instances import Instances
from megavis.composition.segmentation import Segmentation
from megavis.config.errors import UserError
from megavis.data.loading.dataset import ShardDataset, Subset, halves, shuffled
from megavis.evaluation import detection, segmentation
from megavis.evaluation.classes import ClassProbabilities, average, predict_classes
from megavis.evaluation.figures import write_png
from megavis.evaluation.likelihood import measure_likelihood
from megavis.evaluation.results import (
    AveragePrecision,
    DetectionResult,
    EnsembleResult,
    EnsembleRow,
    LikelihoodResult,
    SegmentationResult,
    share_or_dash,
)
from megavis.notebook import Run

_Task = TypeVar("_Task", Segmentation, Instances)


def measure(args: argparse.Namespace) -> int:
    """Measure the likelihood, write it as JSON and print it."""
    with job_closed():
        opened = open_run(
            args.run_folder, step=args.step, device=args.device, precision=args.precision
        )
        images = open_unseen(opened, args.images, option="--images")
        result = measure_likelihood(
            opened.config.name,
            opened.step,
            opened.inference,
            opened.objective,
            first_images(opened, images, args.num_images),
            limit=args.num_images,
        )
    out = result_place(args)
    sys.stdout.write(f"{_likelihood_words(result)}\n")
    result.write(out)
    sys.stdout.write(f"{out}\n")
    return 0


def _likelihood_words(result: LikelihoodResult) -> str:
    given = f", given {result.given}" if result.given else ""
    return (
        f"{result.nats_per_dimension:.4f} nats, {result.bits_per_dimension:.4f} bits per dimension"
        f" ({result.dimension}; {result.dimensions_per_image} per image{given})\n"
        f"{result.nats_per_image:.1f} nats per image; step {result.step},"
        f" {result.num_images} images of {result.data}, {result.precision}"
    )


def ensemble(args: argparse.Namespace) -> int:
    """Evaluate each run, then the ensemble."""
    members: dict[str, ClassProbabilities] = {}
    sources = set()
    with job_closed():
        for folder in args.run_folders:
            found, source = _predict_classes(folder, args)
            members[str(folder)] = found
            sources.add(source)
    if len(sources) > 1:
        raise UserError(
            "the runs were evaluated on different images; name one folder with --images"
        )
    if len(members) > 1:
        try:
            members["together"] = average(list(members.values()))
        except ValueError as error:
            raise UserError(f"{error}: their shards are in different orders") from None
    _report_classes(members, args.json)
    return 0


def _predict_classes(
    folder: Path, args: argparse.Namespace
) -> tuple[ClassProbabilities, tuple[str, int]]:
    """Return a run's class probabilities, and the identity of the images and their number.

    A run without `finetune.test` was evaluated on half of the images that another may have used.
    """
    step, size = _chosen_step(folder), args.image_size
    opened = open_run(folder, step=step, device=args.device, image_size=size)
    objective = classifier_of(opened.objective)
    if objective is None:
        raise UserError(f"{folder} was not fine-tuned with finetune.task: classes")
    images = _test_images(opened, args.images, is_imported=step is None)
    probabilities = predict_classes(opened.inference, objective, images)
    return probabilities, (images.dataset.manifest.source.sha256, len(images))


def _chosen_step(folder: Path) -> int | None:
    """Return the step that fine-tuning chose; None for imported weights, which have no steps."""
    step = finetuned_step(folder)
    if step is None and read_manifest(chosen_checkpoint(folder)).optimizer_step:
        raise UserError(
            f"{folder} is not a finished fine-tuning run: {finetuning_file(folder)} does not name"
            " its chosen step"
        )
    return step


def _test_images(opened: Run, images: str | None, *, is_imported: bool) -> Subset:
    """Open the labelled images to evaluate a run on, which it was not trained on."""
    settings = opened.config.finetune
    assert settings is not None
    if not is_imported:
        dataset = open_unseen(opened, images or settings.test, option="--images")
        return shuffled(dataset) if images or settings.test else halves(dataset)[1]
    if images is None:
        raise UserError(
            f"{opened.folder} has imported weights and no test images; name shards with --images"
        )
    # Its data.train names no folder that it was trained on.
    return shuffled(open_shards(opened, images))


def _report_classes(members: dict[str, ClassProbabilities], path: Path | None) -> None:
    rows = [
        EnsembleRow(name, found.top_k_accuracy(1), found.top_k_accuracy(5))
        for name, found in members.items()
    ]
    width = max(len(name) for name in members)
    for row in rows:
        sys.stdout.write(f"{row.run:<{width}}  top-1 {row.top1:.1%}  top-5 {row.top5:.1%}\n")
    if path is not None:
        count = len(next(iter(members.values())).labels)
        EnsembleResult(count, tuple(rows)).write(path)


def _open_whole_images(
    args: argparse.Namespace, kind: type[_Task], task: str
) -> tuple[Run, _Task, ShardDataset]:
    """Open a run that was fine-tuned for a task, and its test images; raise UserError otherwise."""
    opened = open_run(args.run_folder, step=args.step, precision=args.precision)
    objective = opened.objective
    if not isinstance(objective, kind):
        raise UserError(f"{args.run_folder} was not fine-tuned with finetune.task: {task}")
    images = open_unseen(opened, args.images or objective.settings.test, option="--images")
    return opened, objective, images


def evaluate_segmentation(args: argparse.Namespace) -> int:
    """Predict, and write and print the result on the main process."""
    with layout_job(args):
        opened, objective, images = _open_whole_images(args, Segmentation, "segments")
        names, side = objective.classes_of(images.manifest), opened.config.data.image_size
        stride = args.stride or max(1, 2 * side // 3)
        if stride > side:
            raise UserError(f"--stride {stride}: must be at most {side}, the side of a window")
        result = segmentation.evaluate_originals(
            opened.inference, objective, images, stride=stride, limit=args.num_images
        )
        is_main, step = opened.context.is_main, opened.step
    if is_main:
        path, data = result_place(args), str(images.directory)
        sys.stdout.write(
            f"mIoU {result.mean_iou:.1%}, mean accuracy {result.mean_accuracy:.1%}, pixels"
            f" {result.pixel_accuracy:.1%} | N {result.num_images} of {data}, windows every"
            f" {stride} pixels, step {step}\n"
        )
        SegmentationResult(step, data, stride, result, class_names=names).write(path)
        sys.stdout.write(f"{path}\n")
    return 0


def evaluate_detection(args: argparse.Namespace) -> int:
    """Find objects, and write and print the result on the main process."""
    with layout_job(args):
        opened, objective, images = _open_whole_images(args, Instances, "instances")
        names = objective.classes_of(images.manifest)
        found = detection.evaluate_detection(
            opened.inference,
            objective,
            images,
            batch_size=args.batch_size,
            limit=args.num_images,
        )
        title = f"step {opened.step}: box AP {share_or_dash(found.box.ap)}"
        picture = detection.plot_examples(opened.inference, objective, images, names, title=title)
        is_main, step = opened.context.is_main, opened.step
    if is_main:
        path = result_place(args)
        sys.stdout.write(
            f"{_numbers_line('box', found.box)}\n{_numbers_line('mask', found.mask)}\n"
            f"N {found.num_images} of {images.directory}, step {step}\n"
        )
        DetectionResult(step, str(images.directory), found, class_names=names).write(path)
        write_png(path.with_suffix(".png"), picture)
        sys.stdout.write(f"{path}\n")
    return 0


def _numbers_line(name: str, numbers: AveragePrecision) -> str:
    """Return the twelve numbers in a line."""
    record = numbers.record()
    record.pop("by_class")
    parts = (f"{key.replace('_', ' ')} {share_or_dash(value)}" for key, value in record.items())
    return f"{name}: {', '.join(parts)}"
