"""`megavis evaluate segmentation`: classes of the pixels of whole images."""

from __future__ import annotations

import argparse
import sys

from megavis.commands.opening import layout_job, open_run, open_shards
from megavis.composition.segmentation import Segmentation
from megavis.config.errors import UserError
from megavis.data.loading.leakage import check_no_overlap, training_shards
from megavis.evaluation.results import SegmentationResult
from megavis.evaluation.segmentation import evaluate_originals


def evaluate(args: argparse.Namespace) -> int:
    """Predict, and write and print the result on the main process."""
    with layout_job(args):
        opened = open_run(
            args.run_folder, step=args.step, device=args.device, precision=args.precision
        )
        objective = opened.objective
        if not isinstance(objective, Segmentation):
            raise UserError(f"{args.run_folder} was not fine-tuned with finetune.task: segments")
        folder = args.images or objective.settings.test or opened.config.data.validation
        assert folder is not None, "required by the config's checks"
        images, side = open_shards(opened, folder), opened.config.data.image_size
        found = objective.classes_of(images.manifest)
        check_no_overlap(images, list(training_shards(opened.config)))
        stride = args.stride or max(1, 2 * side // 3)
        if stride > side:
            text = f"--stride {stride}: must be at most {side}, the side of a window"
            raise UserError(text)
        result = evaluate_originals(
            opened.inference, objective, images, stride=stride, limit=args.num_images
        )
        is_main, step = opened.context.is_main, opened.step
    if is_main:
        path = args.out or args.run_folder / "evaluation" / "segmentation.json"
        data = str(images.directory)
        sys.stdout.write(
            f"mIoU {result.mean_iou:.1%}, mean accuracy {result.mean_accuracy:.1%}, pixels"
            f" {result.pixel_accuracy:.1%} | N {result.num_images} of {images.directory}, windows"
            f" every {stride} pixels, step {step}\n"
        )
        SegmentationResult(step, data, stride, result, class_names=found).write(path)
        sys.stdout.write(f"{path}\n")
    return 0
