"""Options of `megavis figure`."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from megavis.commands.options.shared import (
    add_data_arguments,
    add_feature_arguments,
    add_image_arguments,
    add_layout_argument,
    add_probe_arguments,
    add_run,
    add_runs,
    refuse_options,
)
from megavis.config.arguments import positive
from megavis.config.declarations import FigureSpec, paper_figures

_OF_A_PROBE = (
    *("--train", "--validation", "--selection", "--train-images", "--validation-images", "--seed"),
    *("--step", "--masks", "--untrained-networks", "--precision", "--no-cache"),
)


def add_figure(parser: argparse.ArgumentParser) -> None:
    """Add the options of `megavis figure`."""
    parser.description = (
        "Plot a run's features or predictions: a PNG, and its numbers as CSV, in RUN/evaluation."
    )
    parser.epilog = "example: megavis figure depth runs/igpt_demo"
    figures = parser.add_subparsers(dest="figure", required=True, metavar="FIGURE")
    _add_depth(figures)
    _add_likelihood(figures)
    _add_completions(figures)
    _add_neighbors(figures)
    for spec in (*GENERAL_FIGURES, *paper_figures()):
        _add_declared(figures, spec)


def _add_declared(figures: Any, spec: FigureSpec) -> None:
    parser = figures.add_parser(
        spec.name,
        help=spec.help,
        description=spec.description,
        epilog=f"example: megavis figure {spec.name} {spec.example}",
    )
    add_image_arguments(parser, num_images=spec.num_images)
    spec.add_options(parser)
    parser.set_defaults(run="figure:draw_declared", spec=spec)


def _add_depth(figures: Any) -> None:
    parser = figures.add_parser(
        "depth",
        help="accuracy of the linear probe by layer (iGPT, Figure 2)",
        description="Probe every layer of a run, of untrained networks like it, and raw pixels, and"
        " plot accuracy over depth.",
        epilog="example: megavis figure depth runs/igpt_demo --train-images 2000",
    )
    add_run(parser)
    parser.add_argument(
        "--probe",
        type=Path,
        metavar="FILE",
        help="plot this result of `megavis probe`, instead of probing",
    )
    add_data_arguments(parser)
    add_layout_argument(parser)
    add_probe_arguments(parser)
    parser.set_defaults(run="figure:draw_depth", check=_check_depth)


def _check_depth(args: argparse.Namespace) -> None:
    if args.probe is not None:
        refuse_options(args, _OF_A_PROBE, "to --probe FILE, which is plotted as written")


def _add_likelihood(figures: Any) -> None:
    parser = figures.add_parser(
        "likelihood",
        help="accuracy over validation loss of all checkpoints (iGPT, Figure 3)",
        description="Compute the validation loss and the best layer's linear probe of every"
        " checkpoint in a run folder, and plot one over the other, one line per run. Files go to"
        " the first run's folder. Set checkpoint.keep_at or keep_every in training to have"
        " checkpoints to plot.",
        epilog="example: megavis figure likelihood runs/igpt_s runs/igpt_m",
    )
    add_runs(parser)
    add_data_arguments(parser)
    parser.set_defaults(run="figure:draw_likelihood")


def _add_completions(figures: Any) -> None:
    completions = figures.add_parser(
        "completions",
        help="completed lower halves, and their PSNR (DARL, Figure 7)",
        description="Complete held-out images from their upper halves, and compare with repeating"
        " the last given row: PSNR of the lower halves, of single completions and of their"
        " mean, which is the best guess under squared error. The image shows the first eight:"
        " original, given part, completions.",
        epilog="example: megavis figure completions runs/darl_demo --sampling-steps 20",
    )
    add_image_arguments(completions, num_images=64)
    completions.add_argument(
        "--sampling-steps", type=positive, help="from noise to a patch; default: the config's"
    )
    completions.add_argument(
        "--temperature", type=float, help="noise temperature; default: the config's"
    )
    completions.add_argument("--seed", type=int, default=0, help="random seed")
    completions.add_argument(
        "--completions", type=positive, default=3, help="completions shown per image"
    )
    completions.add_argument(
        "--draws", type=positive, default=8, help="completions per image for the mean"
    )
    completions.set_defaults(run="figure:draw_completions")


def _add_neighbors(figures: Any) -> None:
    neighbors = figures.add_parser(
        "neighbors",
        help="accuracy of nearest neighbours by layer",
        description="Classify held-out images by the nearest training images among the features of"
        " each layer, of the run and of an untrained network like it.",
        epilog="example: megavis figure neighbors runs/demo --train-images 2000",
    )
    add_image_arguments(neighbors, num_images=1000)
    neighbors.add_argument(
        "--train-images", type=positive, default=5000, help="maximum number to compare with"
    )
    neighbors.add_argument(
        "--neighbors", type=positive, default=20, help="number of neighbours that vote"
    )
    add_feature_arguments(neighbors)
    neighbors.set_defaults(run="figure:draw_neighbors")


GENERAL_FIGURES = (
    FigureSpec(
        "attention",
        help="attention of each head by offset, and its entropy",
        description="Average the attention of every head over held-out images by the offset between"
        " query and key, and print its entropy.",
        num_images=256,
        draw="megavis.evaluation.attention_maps:draw",
    ),
    FigureSpec(
        "correlation",
        help="correlation of the last layer's tokens, by position",
        description="Correlate the last layer's tokens at every two positions, within an image and"
        " between two.",
        num_images=512,
        draw="megavis.evaluation.correlation:draw",
    ),
)
"""Declared like the figures of papers, but for runs of any paper."""
