"""MP3: "Position Prediction as an Effective Pretraining Strategy"."""

from __future__ import annotations

import argparse

from megavis.config.papers import FigureSpec

_PLOT = "megavis.papers.mp3.place_figures:plot_"


def _add_seed(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--seed", type=int, default=0, help="seed of context and shuffling")


def _of_images(name: str, text: str) -> FigureSpec:
    return FigureSpec(
        name,
        help=text,
        description=f"Draw {text} at mask ratios 0, 0.25, 0.5 and 0.75. Context patches are"
        " outlined in green; patches predicted at the same position are averaged.",
        num_images=4,
        plot=_PLOT + name,
        example="runs/demo --num-images 4",
        add_options=_add_seed,
        decodes=True,
    )


FIGURES = (
    FigureSpec(
        "positions",
        help="accuracy of predicted patch positions by mask ratio",
        description="Predict the position of every patch of held-out images at several mask ratios,"
        " and plot the accuracy.",
        num_images=1000,
        plot=_PLOT + "positions",
    ),
    _of_images("jigsaw", "images reassembled from predicted positions"),
    _of_images("mixture", "patches of two images, mixed and reassembled"),
)
