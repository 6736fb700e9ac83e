"""Figures of the paper."""

from __future__ import annotations

from megavis.config.figures import FigureSpec

FIGURES = (
    FigureSpec(
        "reconstructions",
        help="hidden patches predicted from the others, and their PSNR",
        description="Hide patches of held-out images as training does and predict them. Prints the"
        " PSNR of what was hidden, and that of giving each hidden patch its true mean colour. The"
        " picture shows the first eight: what was visible, the prediction, the original.",
        num_images=256,
        draw="megavis.papers.mae.reconstructions:draw_reconstructions",
        example="runs/mae_demo",
    ),
)
