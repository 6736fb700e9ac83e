"""Settings of Vision Transformers in folders of `transformers`, and whether they can be converted.

Legend: h hidden size.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from megavis.config.errors import UserError
from megavis.tokenizers.patches import CHANNEL_DEVIATION, CHANNEL_MEAN, Statistics
from megavis.weights.released import read_json

_SIZES = (
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "intermediate_size",
    "image_size",
    "patch_size",
)
_FIXED = {"hidden_act": "gelu", "num_channels": 3, "qkv_bias": True}
_PROCESSOR = "preprocessor_config.json"


def check_vit_settings(
    path: Path, settings: Mapping[str, Any], *, sizes: Sequence[str] = ()
) -> None:
    """Check the `config.json` at `path`.

    Args:
        path: for messages.
        settings: its contents.
        sizes: keys of further positive integers.

    Raises:
        UserError: a size is missing or does not divide another, or the network has other layers.
    """
    for key in (*_SIZES, *sizes):
        size = settings.get(key)
        if not isinstance(size, int) or isinstance(size, bool) or size < 1:
            raise UserError(f"{path}: {key} is {size!r}, not a positive integer")
    for key, wanted in _FIXED.items():
        if settings.get(key, wanted) != wanted:
            raise UserError(f"{path}: {key} is {settings[key]!r}; only {wanted!r} can be imported")
    epsilon = settings.get("layer_norm_eps", 1e-12)
    if not isinstance(epsilon, float) or epsilon <= 0:
        raise UserError(f"{path}: layer_norm_eps is {epsilon!r}, not a positive number")
    for whole, part in (("hidden_size", "num_attention_heads"), ("image_size", "patch_size")):
        if settings[whole] % settings[part]:
            raise UserError(
                f"{path}: {whole} {settings[whole]} is not divisible by {part} {settings[part]}"
            )


def check_shapes(
    folder: Path,
    tensors: Mapping[str, Tensor],
    shapes: Mapping[str, Sequence[int]],
    *,
    wanted: str,
    settings: Mapping[str, Any],
) -> None:
    """Raise UserError unless a folder's weights have tensors of these names and shapes.

    Args:
        folder: for messages.
        tensors: its weights.
        shapes: the shape of each tensor.
        wanted: the class of transformers that has them.
        settings: its `config.json`, which names the class that was saved.
    """
    for name, shape in shapes.items():
        if name not in tensors:
            saved = settings.get("architectures")
            names = f"; config.json names {', '.join(map(str, saved))}" if saved else ""
            raise UserError(f"{folder}: the weights have no {name}, which {wanted} has{names}")
        if list(tensors[name].shape) != list(shape):
            raise UserError(
                f"{folder}: {name} has shape {list(tensors[name].shape)}; config.json implies"
                f" {list(shape)}"
            )


def vit_shapes(settings: Mapping[str, Any], prefix: str) -> dict[str, Sequence[int]]:
    """Return the shapes of an encoder's tensors outside of the blocks, and of its last block."""
    width, side = settings["hidden_size"], settings["patch_size"]
    count = (settings["image_size"] // side) ** 2
    last = f"{prefix}encoder.layer.{settings['num_hidden_layers'] - 1}"
    return {
        f"{prefix}embeddings.cls_token": (1, 1, width),
        f"{prefix}embeddings.position_embeddings": (1, 1 + count, width),
        f"{prefix}embeddings.patch_embeddings.projection.weight": (width, 3, side, side),
        f"{last}.attention.attention.query.weight": (width, width),
        f"{last}.intermediate.dense.weight": (settings["intermediate_size"], width),
    }


def check_depth(folder: Path, tensors: Mapping[str, Tensor], stack: str, layers: int) -> None:
    """Raise UserError if the weights have a block after the last one that `config.json` counts."""
    if any(name.startswith(f"{stack}.{layers}.") for name in tensors):
        raise UserError(
            f"{folder}: the weights have more layers than the {layers} of {stack} in config.json"
        )


def read_statistics(folder: Path) -> Statistics:
    """Return mean and deviation by which a folder's pixels in [0, 1] are standardised.

    Without `preprocessor_config.json` they are ImageNet's.

    Raises:
        UserError: the file contains something else.
    """
    path = folder / _PROCESSOR
    if not path.exists():
        return CHANNEL_MEAN, CHANNEL_DEVIATION
    found = read_json(path)
    half = [0.5] * 3  # What transformers' ViTImageProcessor has by default.
    mean, deviation = found.get("image_mean", half), found.get("image_std", half)
    for key, values in (("image_mean", mean), ("image_std", deviation)):
        is_list = isinstance(values, list) and len(values) == 3
        if not is_list or not all(isinstance(value, float | int) for value in values):
            raise UserError(f"{path}: {key} is {values!r}, not three numbers")
    if min(deviation) <= 0:
        raise UserError(f"{path}: image_std is {deviation!r}; it must be positive")
    if not found.get("do_normalize", True):
        mean, deviation = [0.0] * 3, [1.0] * 3
    factor = found.get("rescale_factor", 1 / 255) if found.get("do_rescale", True) else 1.0
    if not isinstance(factor, float | int) or factor <= 0:
        raise UserError(f"{path}: rescale_factor is {factor!r}, not a positive number")
    scale = 255 * factor
    return tuple(v / scale for v in mean), tuple(v / scale for v in deviation)
