"""iGPT: "Generative Pretraining from Pixels"."""

from __future__ import annotations

from megavis.config.papers import PALETTE, ImportSpec

IMPORTS = (
    ImportSpec(
        "imagegpt",
        help="an ImageGPT folder as transformers saves it (config.json and model.safetensors;"
        " kmeans_centers.npy or preprocessor_config.json for the palette)",
        read="megavis.weights.imagegpt:read_imagegpt",
        options=(PALETTE,),
        model_types=("imagegpt",),
    ),
)
