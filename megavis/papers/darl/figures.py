"""Figures of the paper."""

from __future__ import annotations

from megavis.config.declarations import FigureSpec

FIGURES = (
    FigureSpec(
        "patches",
        help="prediction error by position in the order (DARL, Figures 10 to 14)",
        description="Predict every patch of held-out images from those before it, and plot the"
        " mean error by position in the run's order and in the image.",
        num_images=512,
        draw="megavis.papers.darl.patch_errors:draw_patches",
        example="runs/darl_demo",
    ),
)
