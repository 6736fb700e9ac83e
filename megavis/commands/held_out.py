"""`megavis likelihood` and `megavis ensemble`: likelihood and classes of held-out images."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from megavis.checkpoint.format.folder import chosen_checkpoint, finetuned_step
from megavis.checkpoint.format.manifest import read_manifest
from megavis.commands.opening import first_images, job_closed, open_run, open_shards, open_unseen
from megavis.commands.options.shared import result_place
from megavis.composition.classification import classifier_of
from megavis.config.errors import UserError
from megavis.data.loading.dataset import Subset, halves, shuffled
from megavis.evaluation.classes import ClassProbabilities, average, predict_classes
from megavis.evaluation.likelihood import measure_likelihood
from megavis.evaluation.results import EnsembleResult, EnsembleRow, LikelihoodResult
from megavis.notebook import Run


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
        path = folder / "evaluation" / "finetune_test.json"
        raise UserError(
            f"{folder} is not a finished fine-tuning run: {path} does not name its chosen step"
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
