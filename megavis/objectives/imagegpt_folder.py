"""ImageGPT folders as `transformers` saves them: reading, writing, and their own forward pass."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor

from megavis.config.errors import UserError

TOLERANCE = 1e-4


def read_folder(folder: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return `config.json` and the tensors of `model.safetensors`.

    Raises:
        UserError: when either is missing; pickled weights are not opened.
    """
    settings, weights = folder / "config.json", folder / "model.safetensors"
    for path in (settings, weights):
        if not path.exists():
            raise UserError(
                f"{path}: missing; save the model with transformers'"
                " save_pretrained(DIR, safe_serialization=True)"
            )
    return json.loads(settings.read_text()), load_file(weights)


def write_folder(folder: Path, settings: Mapping[str, Any], tensors: dict[str, Tensor]) -> None:
    """Write both files."""
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(settings, indent=2) + "\n")


def folder_settings(model: Any, *, num_colors: int, num_pixels: int) -> dict[str, Any]:
    """Return the `config.json` of a model of this size."""
    return {
        "architectures": ["ImageGPTForCausalImageModeling"],
        "model_type": "imagegpt",
        "activation_function": "quick_gelu",
        "vocab_size": num_colors + 1,
        "n_positions": num_pixels,
        "n_embd": model.hidden_size,
        "n_inner": model.mlp_size,
        "n_layer": model.num_layers,
        "n_head": model.num_attention_heads,
        "layer_norm_epsilon": model.norm_epsilon,
        "tie_word_embeddings": False,
    }


def folder_logits(
    tensors: Mapping[str, Tensor], settings: Mapping[str, Any], ids: Tensor
) -> Tensor:
    """Run the folder's model, written down apart from megavis's layers to check a conversion.

    Args:
        tensors: by ImageGPT's names.
        settings: `config.json`.
        ids: int64 `[b, n]`.

    Returns:
        logits `[b, n, v]`; those of a place see the pixels before it.
    """

    def norm(x: Tensor, name: str) -> Tensor:
        epsilon = settings.get("layer_norm_epsilon", 1e-5)
        gain = tensors[f"transformer.{name}.weight"]
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + epsilon) * gain

    def project(x: Tensor, name: str) -> Tensor:
        return x @ tensors[f"transformer.{name}.weight"] + tensors[f"transformer.{name}.bias"]

    start = settings["vocab_size"] - 1
    shifted = F.pad(ids, (1, 0), value=start)[:, :-1]
    x = tensors["transformer.wte.weight"][shifted] + tensors["transformer.wpe.weight"]
    for layer in range(settings["n_layer"]):
        attention = project(norm(x, f"h.{layer}.ln_1"), f"h.{layer}.attn.c_attn")
        query, key, value = (
            part.unflatten(-1, (settings["n_head"], -1)).transpose(1, 2)
            for part in attention.chunk(3, dim=-1)
        )
        scores = query @ key.transpose(2, 3) / query.shape[-1] ** 0.5
        future = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        mixed = scores.masked_fill(future, float("-inf")).softmax(-1) @ value
        x = x + project(mixed.transpose(1, 2).flatten(2), f"h.{layer}.attn.c_proj")
        hidden = project(norm(x, f"h.{layer}.ln_2"), f"h.{layer}.mlp.c_fc")
        x = x + project(hidden * (1.702 * hidden).sigmoid(), f"h.{layer}.mlp.c_proj")
    return norm(x, "ln_f") @ tensors["lm_head.weight"].t()


def check_agreement(ours: Tensor, theirs: Tensor) -> float:
    """Return the largest difference of two sets of logits.

    Raises:
        UserError: when it is above 1e-4.
    """
    difference = float((ours - theirs).abs().max())
    if not difference <= TOLERANCE:
        raise UserError(
            f"the converted model's logits differ by {difference:.1e} from the folder's on random"
            f" input, more than {TOLERANCE:.0e}; nothing was kept"
        )
    return difference
