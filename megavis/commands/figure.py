"""`megavis figure`: pictures of what a run's features, and its predictions, are worth."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megavis.commands.arguments import add_run, add_runs
from megavis.commands.group_figure import add_group_figure
from megavis.commands.networks import (
    feature_cache,
    feature_job,
    network_of,
    probe_run,
    report_cache,
)
from megavis.commands.opening import open_run
from megavis.commands.options import refuse_options
from megavis.commands.patch_figures import add_patch_figures
from megavis.commands.position_figures import add_position_figures
from megavis.commands.probing import (
    add_data_arguments,
    add_layout_argument,
    add_probe_arguments,
    probe_data,
)
from megavis.commands.save_figure import save_figure
from megavis.commands.token_figures import add_token_figures
from megavis.config.errors import UserError

if TYPE_CHECKING:
    from megavis.evaluation.likelihood import CheckpointScore
    from megavis.evaluation.probe_result import ProbeResult

_OF_A_PROBE = (
    *("--train", "--validation", "--selection", "--train-images", "--validation-images", "--seed"),
    *("--step", "--masks", "--untrained-networks", "--precision", "--no-cache"),
)


def add_parser(subparsers: Any) -> None:
    """Add the command and its figures to the parser."""
    parser = subparsers.add_parser(
        "figure",
        help="accuracy over depth or loss, errors by patch, completions, as PNG and CSV",
        description="Draw what a run's features or predictions are worth: a PNG and the numbers in"
        " it as CSV, in RUN/evaluation.",
        epilog="example: megavis figure depth runs/igpt_demo",
    )
    figures = parser.add_subparsers(dest="figure", required=True, metavar="FIGURE")
    _add_depth(figures)
    _add_likelihood(figures)
    add_patch_figures(figures)
    add_group_figure(figures)
    add_position_figures(figures)
    add_token_figures(figures)


def _add_depth(figures: Any) -> None:
    parser = figures.add_parser(
        "depth",
        help="accuracy of the linear probe by layer (iGPT, Figure 2)",
        description="Probe every layer of a run, of untrained networks like it, and raw pixels, and"
        " draw accuracy over depth.",
        epilog="example: megavis figure depth runs/igpt_demo --train-images 2000",
    )
    add_run(parser)
    parser.add_argument(
        "--probe",
        type=Path,
        metavar="FILE",
        help="draw what `megavis probe` has written there, instead of probing",
    )
    add_data_arguments(parser)
    add_layout_argument(parser)
    add_probe_arguments(parser)
    parser.set_defaults(run=draw_depth)


def _add_likelihood(figures: Any) -> None:
    parser = figures.add_parser(
        "likelihood",
        help="accuracy over validation loss of all checkpoints (iGPT, Figure 3)",
        description="Compute the validation loss and the best layer's linear probe of every"
        " checkpoint in a run folder, and draw one over the other, a line a run. What is written"
        " lies in the first run's folder. Set checkpoint.keep_at or keep_every in training, so that"
        " there are checkpoints to draw.",
        epilog="example: megavis figure likelihood runs/igpt_s runs/igpt_m",
    )
    add_runs(parser)
    add_data_arguments(parser)
    parser.set_defaults(run=draw_likelihood)


def draw_depth(args: argparse.Namespace) -> int:
    """Probe, or read a probe, and draw.

    Raises:
        UserError: the run, its data or the file cannot be opened.
    """
    from megavis.commands.quiet import quietly

    with quietly():
        from megavis.evaluation import figures

    result = _depth_result(args)
    if result is None:
        return 0
    picture = figures.draw_depth(result, name=args.run_folder.name)
    save_figure(args.run_folder / "evaluation", "depth", picture, figures.depth_rows(result))
    if args.probe is None:
        result.write(args.run_folder / "evaluation" / "depth.json")
    with quietly():
        figures.show_in_tensorboard(args.run_folder, "depth", picture, step=result.step)
    return 0


def _depth_result(args: argparse.Namespace) -> ProbeResult | None:
    from megavis.commands.quiet import quietly

    with quietly():
        from megavis.evaluation.probe import ProbeSettings
        from megavis.evaluation.probe_result import ProbeResult

    if args.probe is not None:
        refuse_options(args, _OF_A_PROBE, "to --probe FILE, which is drawn as it was written")
        return ProbeResult.read(args.probe)
    with feature_job(args):
        opened = open_run(args.run_folder, step=args.step, precision=args.precision)
        return probe_run(opened, args, ProbeSettings(seed=args.seed))


def draw_likelihood(args: argparse.Namespace) -> int:
    """Score every checkpoint of every run and draw.

    Raises:
        UserError: a run, its data or a checkpoint cannot be opened.
    """
    from megavis.commands.quiet import quietly

    with quietly():
        from megavis.evaluation import figures

    with feature_job(args, alone=True):
        scores = [score for folder in args.run_folders for score in _scores(folder, args)]
        pixels = _pixel_accuracy(args)
    picture = figures.draw_likelihood(scores, pixels=pixels)
    folder = args.run_folders[0] / "evaluation"
    save_figure(folder, "likelihood", picture, figures.likelihood_rows(scores))
    return 0


def _scores(folder: Path, args: argparse.Namespace) -> Iterator[CheckpointScore]:
    """Yield the score of each checkpoint of a run, printed as it comes."""
    from megavis.checkpoint.format.folder import saved_steps
    from megavis.evaluation.likelihood import score_checkpoint
    from megavis.evaluation.probe import ProbeSettings

    steps = saved_steps(folder)
    if not steps:
        raise UserError(f"{folder} has no checkpoint yet")
    for step in steps:
        opened = open_run(folder, step=step, precision=args.precision)
        cache = feature_cache(opened, args)
        score = score_checkpoint(
            opened.config.name,
            step,
            network_of(opened, cache),
            probe_data(opened, args),
            ProbeSettings(seed=args.seed),
        )
        sys.stdout.write(
            f"{score.run} step {step}: validation loss {score.validation_loss:.4f},"
            f" best layer {score.layer} {score.accuracy:.1%}\n"
        )
        report_cache(cache)
        sys.stdout.flush()
        yield score


def _pixel_accuracy(args: argparse.Namespace) -> float:
    """Return the accuracy of raw pixels on the first run's images."""
    from megavis.evaluation.probe import ProbeSettings, score_pixels

    opened = open_run(args.run_folders[0], step=None)
    return score_pixels(probe_data(opened, args), ProbeSettings(seed=args.seed)).accuracy
