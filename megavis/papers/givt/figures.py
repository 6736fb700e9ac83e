"""Figures of the paper."""

from __future__ import annotations

import argparse

from megavis.config.arguments import non_negative
from megavis.config.declarations import FigureSpec


def _add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--label", type=non_negative, metavar="CLASS", help="only images of this class"
    )


FIGURES = (
    FigureSpec(
        "deviations",
        help="predicted standard deviation by token, with and without class (GIVT, Figure 7)",
        description="Predict each latent token of held-out images from those before it, with and"
        " without the image's class, and plot the standard deviation of the mixture, averaged over"
        " components by their weights, over the channels of a token and over images.",
        num_images=128,
        draw="megavis.papers.givt.deviation_figure:draw_deviations",
        example="runs/givt_causal_default --label 130",
        add_options=_add_options,
    ),
)
