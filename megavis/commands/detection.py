"""`megavis evaluate detection`: boxes and masks of objects in whole images."""

from __future__ import annotations

import argparse
import sys

from megavis.commands.opening import layout_job, open_run, open_unseen
from megavis.commands.options.shared import result_place
from megavis.composition.instances import Instances
from megavis.config.errors import UserError
from megavis.evaluation.detection import evaluate_detection, plot_examples
from megavis.evaluation.figures import write_png
from megavis.evaluation.results import AveragePrecision, DetectionResult, share_or_dash


def evaluate(args: argparse.Namespace) -> int:
    """Find objects, and write and print the result on the main process."""
    with layout_job(args):
        opened = open_run(
            args.run_folder, step=args.step, device=args.device, precision=args.precision
        )
        objective = opened.objective
        if not isinstance(objective, Instances):
            raise UserError(f"{args.run_folder} was not fine-tuned with finetune.task: instances")
        images = open_unseen(opened, args.images or objective.settings.test, option="--images")
        names = objective.classes_of(images.manifest)
        found = evaluate_detection(
            opened.inference,
            objective,
            images,
            batch_size=args.batch_size,
            limit=args.num_images,
        )
        title = f"step {opened.step}: box AP {share_or_dash(found.box.ap)}"
        picture = plot_examples(opened.inference, objective, images, names, title=title)
        is_main, step = opened.context.is_main, opened.step
    if is_main:
        path = result_place(args)
        sys.stdout.write(
            f"{_line('box', found.box)}\n{_line('mask', found.mask)}\n"
            f"N {found.num_images} of {images.directory}, step {step}\n"
        )
        DetectionResult(step, str(images.directory), found, class_names=names).write(path)
        write_png(path.with_suffix(".png"), picture)
        sys.stdout.write(f"{path}\n")
    return 0


def _line(name: str, numbers: AveragePrecision) -> str:
    """Return the twelve numbers in a line."""
    record = numbers.record()
    record.pop("by_class")
    parts = (f"{key.replace('_', ' ')} {share_or_dash(value)}" for key, value in record.items())
    return f"{name}: {', '.join(parts)}"
