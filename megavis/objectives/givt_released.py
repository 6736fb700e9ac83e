"""GIVT's released adapter and VAE under megavis's names; the Transformers: `givt_weights.py`.

The checkpoints are `.npz` files of Flax parameters: flat names, kernels stored input first
(convolutions: h, w, in, out).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from megavis.config.errors import UserError
from megavis.tokenizers.shapes import VAEShape

Arrays = Mapping[str, np.ndarray]


def read_arrays(path: Path) -> dict[str, np.ndarray]:
    """Return the arrays of an `.npz` file, with the names that follow `params/` if there is one.

    Raises:
        UserError: the file is missing or is no such archive; pickled arrays are not opened.
    """
    try:
        with np.load(path, allow_pickle=False) as archive:
            arrays = {name: archive[name] for name in archive.files}
    except (OSError, ValueError) as error:
        raise UserError(f"{path} is not an .npz file of arrays: {error}") from None
    inner = {name.removeprefix("params/"): a for name, a in arrays.items() if "params/" in name}
    return inner or arrays


def adapter_weights(released: Arrays) -> dict[str, Tensor]:
    """Rename an adapter's arrays (`modules_3/Conv_0/kernel`) to those of `Adapter`."""
    renamed = {}
    for name, array in released.items():
        found = re.fullmatch(r"modules_(\d+)/(Conv|gn)_(\d)/(kernel|scale|bias)", name)
        if found is None:
            raise UserError(f"{name} is no array of a released adapter")
        block, kind, number, part = found.groups()
        layer = f"blocks.{block}.{'conv' if kind == 'Conv' else 'norm'}_{number}"
        renamed[f"{layer}.{'bias' if part == 'bias' else 'weight'}"] = _plain(array)
    return renamed


def vae_weights(released: Arrays) -> dict[str, Tensor]:
    """Rename a VAE's arrays to those of `VAENetwork`.

    Of a training checkpoint that also holds moving averages, these are taken.
    """
    arrays = _vae_arrays(released)
    shape = vae_shape(arrays)
    names = dict(_vae_layers(shape))
    renamed = {}
    for name, array in arrays.items():
        layer, _, part = name.rpartition("/")
        if layer not in names:
            raise UserError(f"{name} is no array of a released VAE")
        renamed[f"{names[layer]}.{'bias' if part == 'bias' else 'weight'}"] = _plain(array)
    return renamed


def vae_shape(released: Arrays) -> VAEShape:
    """Read the sizes of a VAE off its arrays.

    Raises:
        UserError: when the arrays are of no such network.
    """
    arrays = _vae_arrays(released)
    try:
        filters = arrays["cnn_encoder/Conv_0/kernel"].shape[-1]
        latent_channels = arrays["cnn_decoder/Conv_0/kernel"].shape[-2]
    except KeyError as error:
        raise UserError(f"the file has no {error.args[0]}; is it a released VAE?") from None
    num_levels = sum(bool(re.fullmatch(r"cnn_decoder/Conv_\d+/kernel", n)) for n in arrays) - 1
    pattern = r"cnn_encoder/ResBlock_\d+/Conv_0/kernel"
    num_blocks = sum(bool(re.fullmatch(pattern, name)) for name in arrays)
    per_level = num_blocks // (num_levels + 1)
    firsts = (f"cnn_encoder/ResBlock_{level * per_level}" for level in range(num_levels))
    widths = [arrays[f"{first}/Conv_1/kernel"].shape[-1] for first in firsts]
    return VAEShape(latent_channels, filters, tuple(w // filters for w in widths), per_level)


def _vae_arrays(released: Arrays) -> dict[str, np.ndarray]:
    for prefix in ("ema_params/", "g_params/"):
        found = {f"cnn_{n.removeprefix(prefix)}": a for n, a in released.items() if prefix in n}
        if found:
            return found
    return dict(released)


def _vae_layers(shape: VAEShape) -> Iterator[tuple[str, str]]:
    """Yield released and own name of every layer that has parameters."""
    count, levels = shape.blocks_per_level, len(shape.multipliers)
    level_blocks = [f"levels.{level}.{i}" for level in range(levels) for i in range(count)]
    middle_blocks = [f"middle.{i}" for i in range(count)]
    enlargers = [f"enlargers.{i}" for i in range(levels - 1)]
    for part, blocks, convolutions in (
        ("encoder", level_blocks + middle_blocks, ["conv_in", "conv_out"]),
        ("decoder", middle_blocks + level_blocks, ["conv_in", *enlargers, "conv_out"]),
    ):
        for number, name in enumerate(convolutions):
            yield f"cnn_{part}/Conv_{number}", f"{part}.{name}"
        yield f"cnn_{part}/GroupNorm_0", f"{part}.norm"
        for number, name in enumerate(blocks):
            old, new = f"cnn_{part}/ResBlock_{number}", f"{part}.{name}"
            for i in (0, 1):
                yield f"{old}/GroupNorm_{i}", f"{new}.norm_{i}"
                yield f"{old}/Conv_{i}", f"{new}.conv_{i}"
            yield f"{old}/Conv_2", f"{new}.shortcut"


def _plain(array: np.ndarray) -> Tensor:
    """Return a vector as it is, and a kernel `[..., in, out]` output first."""
    tensor = torch.from_numpy(np.asarray(array, dtype=np.float32))
    if tensor.ndim == 4:
        tensor = tensor.permute(3, 2, 0, 1)
    elif tensor.ndim == 2:
        tensor = tensor.t()
    return tensor.contiguous()
