"""Released weights that the paper's model holds: Vision Transformers with a class token."""

from __future__ import annotations

from megavis.config.declarations import HEADS, ImportSpec

_RUN = "megavis.papers.darl.vit_folders:"

IMPORTS = (
    ImportSpec(
        "timm",
        help="a Vision Transformer with a class token as saved by timm's save_for_hf"
        " (model.safetensors and config.json); the run can be fine-tuned",
        read=_RUN + "read_timm",
        options=(HEADS,),
        model_types=("timm",),
    ),
    ImportSpec(
        "vit",
        help="a ViT folder as transformers saves it",
        read=_RUN + "read_vit",
        model_types=("vit",),
    ),
)
