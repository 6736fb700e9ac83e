"""Released weights of the paper."""

from __future__ import annotations

from megavis.config.declarations import ImportSpec

IMPORTS = (
    ImportSpec(
        "vit_mae",
        help="a ViTMAE folder as transformers saves it",
        read="megavis.papers.mae.vit_mae:read_vit_mae",
        model_types=("vit_mae",),
    ),
)
