"""DARL: "Denoising Autoregressive Representation Learning"."""

from __future__ import annotations

from megavis.config.papers import HEADS, FigureSpec, ImportSpec

FIGURES = (
    FigureSpec(
        "patches",
        help="prediction error by position in the order (DARL, Figures 10 to 14)",
        description="Predict every patch of held-out images from those before it, and plot the"
        " mean error by position in the run's order and in the image.",
        num_images=512,
        plot="megavis.papers.darl.patch_errors:plot_patches",
        example="runs/darl_demo",
        reads_classes=True,
    ),
)

IMPORTS = (
    ImportSpec(
        "timm",
        help="a Vision Transformer with a class token as saved by timm's save_for_hf"
        " (model.safetensors and config.json); the run can be fine-tuned",
        read="megavis.weights.timm_folder:read_timm",
        options=(HEADS,),
        model_types=("timm",),
    ),
    ImportSpec(
        "vit",
        help="a ViT folder as transformers saves it",
        read="megavis.weights.vits:read_vit",
        model_types=("vit",),
    ),
)
