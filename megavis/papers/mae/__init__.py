"""MAE: "Masked Autoencoders Are Scalable Vision Learners"."""

from __future__ import annotations

from megavis.config.papers import FigureSpec, ImportSpec

FIGURES = (
    FigureSpec(
        "reconstructions",
        help="hidden patches predicted from the others, and their PSNR",
        description="Hide patches of held-out images as in training and predict them. Prints the"
        " PSNR of the hidden patches, and as a baseline that of their true mean colours. The figure"
        " shows the first eight images: visible patches, prediction, original.",
        num_images=256,
        plot="megavis.papers.mae.reconstructions:plot_reconstructions",
        example="runs/mae_demo",
        reads_classes=True,
        decodes=True,
    ),
)

IMPORTS = (
    ImportSpec(
        "vit_mae",
        help="a ViTMAE folder as transformers saves it",
        read="megavis.weights.vit_mae:read_vit_mae",
        model_types=("vit_mae",),
    ),
)
