"""GVP: "Bridging Autoregressive and Masked Modeling"."""

from __future__ import annotations

import argparse

from megavis.config.arguments import add_perceptual_arguments, non_negative_number, positive
from megavis.config.papers import FigureSpec


def _add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--share", type=non_negative_number, default=0.25, help="share of the patches given"
    )
    parser.add_argument(
        "--groups", type=_group_counts, default=(1, 4, 12), metavar="N,N", help="numbers of groups"
    )
    parser.add_argument(
        "--orders", type=positive, default=1, help="orders of the hidden patches to average over"
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of the hidden patches")
    add_perceptual_arguments(parser)


def _group_counts(text: str) -> tuple[int, ...]:
    """Parse numbers of groups such as `1,4,12`."""
    try:
        counts = tuple(int(part) for part in text.split(","))
    except ValueError:
        counts = ()
    if not counts or min(counts) < 1:
        raise argparse.ArgumentTypeError(f"'{text}' is not a list of numbers such as 1,4,12")
    return counts


FIGURES = (
    FigureSpec(
        "groups",
        help="hidden patches predicted group by group, and all at once",
        description="Give a random share of each held-out image's patches and predict the others in"
        " groups, each from those before it; one group is masked modelling. Prints the PSNR of the"
        " hidden patches for each number of groups. The figure shows the first eight images:"
        " original, given patches, one column per number of groups.",
        num_images=256,
        plot="megavis.papers.gvp.group_figure:plot_groups",
        example="runs/patches --groups 1,4,12",
        add_options=_add_options,
        decodes=True,
    ),
)
