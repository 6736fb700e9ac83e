"""`megavis likelihood`: nats and bits per dimension of held-out images."""

from __future__ import annotations

import argparse
import sys

from megavis.commands.opening import job_closed, open_held_out, open_run, training_shards
from megavis.data.loading.leakage import check_no_overlap
from megavis.evaluation.likelihood import LikelihoodResult, measure_likelihood


def run(args: argparse.Namespace) -> int:
    """Measure, write as JSON and print.

    Raises:
        UserError: the loss is not a likelihood, or the images cannot be opened or were trained
            on.
    """
    with job_closed():
        opened = open_run(
            args.run_folder, step=args.step, device=args.device, precision=args.precision
        )
        images = open_held_out(opened, args.images, option="--images")
        check_no_overlap(images, training_shards(opened))
        result = measure_likelihood(
            opened.config.name,
            opened.step,
            opened.runner,
            opened.objective,
            images,
            limit=args.num_images,
        )
    out = args.out or opened.folder / "evaluation" / "likelihood.json"
    result.write(out)
    sys.stdout.write(f"{_words(result)}\n{out}\n")
    return 0


def _words(result: LikelihoodResult) -> str:
    given = f", given {result.given}" if result.given else ""
    return (
        f"{result.nats_per_dimension:.4f} nats, {result.bits_per_dimension:.4f} bits per dimension"
        f" ({result.dimension}; {result.dimensions_per_image} per image{given})\n"
        f"{result.nats_per_image:.1f} nats per image; step {result.step},"
        f" {result.num_images} images of {result.data}, {result.precision}"
    )
