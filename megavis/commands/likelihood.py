"""`megavis likelihood`: nats and bits a dimension of held-out images."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megavis.commands.arguments import add_precision
from megavis.commands.opening import job_closed, open_run, training_shards
from megavis.commands.patch_figures import add_image_arguments, held_out_images

if TYPE_CHECKING:
    from megavis.evaluation.likelihood import LikelihoodResult


def add_parser(subparsers: Any) -> None:
    """Add the command to the parser."""
    parser = subparsers.add_parser(
        "likelihood",
        help="nats and bits a dimension of held-out images",
        description="Print how likely a run finds images that it was not trained on, where its loss"
        " is a likelihood: iGPT's next colour, GIVT's next latent. A dimension is what the model"
        " predicts, never a byte of the photograph; the output says what it is. `megavis figure"
        " likelihood` draws probe accuracy over validation loss.",
        epilog="example: megavis likelihood runs/igpt_demo",
    )
    add_image_arguments(parser, num_images=None)
    add_precision(parser)
    parser.add_argument("--out", type=Path, help="default: RUN/evaluation/likelihood.json")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Measure, write as JSON and print.

    Raises:
        UserError: the run's loss is no likelihood, or its images cannot be opened or were trained
            on.
    """
    with job_closed():
        opened = open_run(
            args.run_folder, step=args.step, device=args.device, precision=args.precision
        )
        from megavis.data.loading.leakage import refuse_overlap
        from megavis.evaluation.likelihood import measure_likelihood

        images = held_out_images(opened, args)
        refuse_overlap(images, training_shards(opened))
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
        f"{result.nats_per_dimension:.4f} nats, {result.bits_per_dimension:.4f} bits a dimension"
        f" ({result.dimension}; {result.dimensions_per_image} an image{given})\n"
        f"{result.nats_per_image:.1f} nats an image; step {result.step},"
        f" {result.num_images} images of {result.data}, {result.precision}"
    )
