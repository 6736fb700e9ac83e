"""`megavis evaluate segmentation`: classes of the pixels of whole images."""

from __future__ import annotations

import argparse
import sys

from megavis.commands.opening import layout_job, open_run, open_unseen
from megavis.commands.options.shared import result_place
from megavis.composition.segmentation import Segmentation
from megavis.config.errors import UserError
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
        images = open_unseen(opened, args.images or objective.settings.test, option="--images")
        names, side = objective.classes_of(images.manifest), opened.config.data.image_size
        stride = args.stride or max(1, 2 * side // 3)
        if stride > side:
            raise UserError(f"--stride {stride}: must be at most {side}, the side of a window")
        result = evaluate_originals(
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
