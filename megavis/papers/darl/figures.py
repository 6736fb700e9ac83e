"""Figures of the paper."""

from __future__ import annotations

from megavis.config.figures import FigureSpec

FIGURES = (
    FigureSpec(
        "patches",
        help="prediction error by place of the order (DARL, Figures 10 to 14)",
        description="Predict every patch of held-out images from those before it, and draw the"
        " mean error over the places of the run's order and over the image.",
        num_images=512,
        draw="megavis.papers.darl.patch_errors:draw_patches",
        example="runs/darl_demo",
    ),
)
