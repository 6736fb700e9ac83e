"""Vision Transformers as `transformers` saves them, from and to timm's names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from megavis.config.errors import UserError
from megavis.model.vit_blocks import TIMM, TRANSFORMERS, block_from, block_to
from megavis.papers.darl.timm_folder import TimmViT

_OUTER = (
    ("patch_embed.proj", "embeddings.patch_embeddings.projection"),
    ("norm", "layernorm"),
)


def transformers_settings(vit: TimmViT) -> dict[str, Any]:
    """Return the `config.json` of `ViTModel`, or of `ViTForImageClassification`."""
    classes = vit.num_classes
    settings = {
        "architectures": ["ViTForImageClassification" if classes else "ViTModel"],
        "model_type": "vit",
        "hidden_size": vit.hidden_size,
        "num_hidden_layers": vit.num_layers,
        "num_attention_heads": vit.num_heads,
        "intermediate_size": vit.mlp_size,
        "hidden_act": "gelu",
        "layer_norm_eps": vit.epsilon,
        "image_size": vit.image_size,
        "patch_size": vit.patch_size,
        "num_channels": 3,
        "qkv_bias": True,
    }
    if classes:
        names = {index: f"class {index}" for index in range(classes)}
        settings |= {"id2label": names, "label2id": {name: i for i, name in names.items()}}
    return settings


def to_transformers(vit: TimmViT) -> dict[str, Tensor]:
    """Return the tensors by the names of `transformers`."""
    tensors = vit.tensors
    found = {
        "embeddings.cls_token": tensors["cls_token"],
        "embeddings.position_embeddings": tensors["pos_embed"],
    }
    for kind in ("weight", "bias"):
        found |= {f"{new}.{kind}": tensors[f"{old}.{kind}"] for old, new in _OUTER}
    for layer in range(vit.num_layers):
        ours = block_from(tensors, f"blocks.{layer}.", TIMM, num_heads=vit.num_heads)
        block = block_to(ours, "", TRANSFORMERS, num_heads=vit.num_heads)
        found |= {f"encoder.layer.{layer}.{name}": tensor for name, tensor in block.items()}
    if vit.num_classes:
        found = {f"vit.{name}": tensor for name, tensor in found.items()}
        found |= {f"classifier.{kind}": tensors[f"head.{kind}"] for kind in ("weight", "bias")}
    return {name: tensor.contiguous() for name, tensor in found.items()}


def from_transformers(tensors: Mapping[str, Tensor], settings: Mapping[str, Any]) -> TimmViT:
    """Undo `to_transformers`.

    Raises:
        UserError: a tensor is missing.
    """
    inner = {name.removeprefix("vit."): tensor.float() for name, tensor in tensors.items()}
    heads, layers = settings["num_attention_heads"], settings["num_hidden_layers"]
    try:
        found = {
            "cls_token": inner["embeddings.cls_token"],
            "pos_embed": inner["embeddings.position_embeddings"],
        }
        for kind in ("weight", "bias"):
            found |= {f"{old}.{kind}": inner[f"{new}.{kind}"] for old, new in _OUTER}
        for layer in range(layers):
            ours = block_from(inner, f"encoder.layer.{layer}.", TRANSFORMERS, num_heads=heads)
            block = block_to(ours, "", TIMM, num_heads=heads)
            found |= {f"blocks.{layer}.{name}": tensor for name, tensor in block.items()}
    except KeyError as error:
        raise UserError(f"the folder's weights have no {error.args[0]}; is it a ViT?") from None
    if "classifier.weight" in inner:
        found |= {f"head.{kind}": inner[f"classifier.{kind}"] for kind in ("weight", "bias")}
    return TimmViT(found, heads, epsilon=settings.get("layer_norm_eps", 1e-12))
