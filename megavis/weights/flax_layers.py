"""Convert layers of GIVT's released models and VAEs to megavis' names.

Flax stores kernels input first, and those of attention as (width, heads, head size), or (heads,
head size, width) for the output. Functions that yield tensors by name raise UserError if an array
is missing; `own` is the layer's name in megavis, `released` the prefix of its arrays.
"""

from __future__ import annotations

import re
import zipfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from megavis.config.errors import UserError
from megavis.model.attention import join_heads

Arrays = Mapping[str, np.ndarray]
Named = Iterator[tuple[str, Tensor]]


def read_arrays(path: Path) -> dict[str, np.ndarray]:
    """Return the arrays of an `.npz` file; only those under `params/`, if there are any.

    Raises:
        UserError: the file is missing or is not such an archive; pickled arrays are not opened.
    """
    try:
        archive = np.load(path, allow_pickle=False)
        if not isinstance(archive, np.lib.npyio.NpzFile):
            raise ValueError("it holds a single array")
        with archive:
            arrays = {name: archive[name] for name in archive.files}
    except (OSError, ValueError, EOFError, zipfile.BadZipFile) as error:
        raise UserError(f"{path} is not an .npz file of arrays: {error}") from None
    inner = {name.removeprefix("params/"): a for name, a in arrays.items() if "params/" in name}
    return inner or arrays


@dataclass(frozen=True)
class ReleasedArrays:
    """A released model.

    Attributes:
        arrays: arrays by their released names.
    """

    arrays: Arrays
    kind: ClassVar[str] = "GIVT"
    """Name of such models in errors."""

    def array(self, name: str) -> np.ndarray:
        """Return an array in float32; raises UserError if it is missing."""
        if name not in self.arrays:
            raise UserError(f"the file has no {name}; is it a released {self.kind}?")
        return np.asarray(self.arrays[name], dtype=np.float32)

    def tensor(self, name: str) -> Tensor:
        """Return an array as a tensor; raises UserError if it is missing."""
        return torch.from_numpy(self.array(name))

    def inside(self, prefix: str) -> Arrays:
        """Return the arrays whose names begin with `prefix`, without it."""
        return {n.removeprefix(prefix): a for n, a in self.arrays.items() if n.startswith(prefix)}

    def blocks(self, prefix: str, *, axis: int = 0) -> list[Arrays]:
        """Return the arrays of each block, named inside the block.

        Args:
            prefix: blocks are `{prefix}3/...` or `{prefix}_3/...`, or stacked in `{prefix}/...`.
            axis: on which they are stacked.

        Raises:
            UserError: there are none, or one is missing.
        """
        stacked = {name: np.moveaxis(a, axis, 0) for name, a in self.inside(f"{prefix}/").items()}
        if stacked:
            count = len(next(iter(stacked.values())))
            return [{name: a[number] for name, a in stacked.items()} for number in range(count)]
        found = (re.match(rf"{prefix}_?(\d+)/", name) for name in self.arrays)
        starts = {int(match[1]): match[0] for match in found if match}
        missing = set(range(max(starts, default=0) + 1)) - set(starts)
        if missing:
            raise UserError(
                f"the file has no {prefix}{min(missing)}; is it a released {self.kind}?"
            )
        return [self.inside(starts[number]) for number in range(len(starts))]


def adapter_weights(released: Arrays) -> dict[str, Tensor]:
    """Rename an adapter's arrays (`modules_3/Conv_0/kernel`) to those of `Adapter`."""
    renamed = {}
    for name, array in released.items():
        found = re.fullmatch(r"modules_(\d+)/(Conv|gn)_(\d)/(kernel|scale|bias)", name)
        if found is None:
            raise UserError(f"{name} is not an array of a released adapter")
        block, kind, number, part = found.groups()
        layer = f"blocks.{block}.{'conv' if kind == 'Conv' else 'norm'}_{number}"
        renamed[f"{layer}.{'bias' if part == 'bias' else 'weight'}"] = plain(array)
    return renamed


def plain(array: np.ndarray) -> Tensor:
    """Convert an array to a tensor; a kernel `[..., in, out]` becomes output first."""
    tensor = torch.from_numpy(np.asarray(array, dtype=np.float32))
    if tensor.ndim == 4:
        tensor = tensor.permute(3, 2, 0, 1)
    elif tensor.ndim == 2:
        tensor = tensor.t()
    return tensor.contiguous()


def block_weights(arrays: Arrays) -> Named:
    """Yield the tensors of a decoder block."""
    norms = {"input_layernorm": "LayerNorm1", "pre_mlp_layernorm": "LayerNorm3"}
    yield from _attention("self_attention", arrays, "SelfAttn/")
    if "CrossAttn/query/kernel" in arrays:
        norms["pre_cross_attn_layernorm"] = "LayerNorm2"
        yield from _attention("cross_attention", arrays, "CrossAttn/")
    for own, released in norms.items():
        yield from norm(own, arrays, f"{released}/")
    yield from _mlp(arrays, "MLP/")


def encoder_block_weights(arrays: Arrays) -> Named:
    """Yield the tensors of an encoder block."""
    yield from _attention("self_attention", arrays, "MultiHeadDotProductAttention_0/")
    yield from norm("input_layernorm", arrays, "LayerNorm_0/")
    yield from norm("pre_mlp_layernorm", arrays, "LayerNorm_1/")
    yield from _mlp(arrays, "MlpBlock_0/")


def norm(own: str, arrays: Arrays, released: str = "") -> Named:
    """Yield the gain and bias of a norm, as far as present."""
    for own_part, part in (("weight", "scale"), ("bias", "bias")):
        if f"{released}{part}" in arrays:
            yield f"{own}.{own_part}", _tensor(arrays, f"{released}{part}")


def dense(own: str, arrays: Arrays, released: str = "") -> Named:
    """Yield weight and bias of a linear layer."""
    yield f"{own}.weight", _tensor(arrays, f"{released}kernel").t()
    yield f"{own}.bias", _tensor(arrays, f"{released}bias")


def _mlp(arrays: Arrays, released: str) -> Named:
    for number, own in enumerate(("mlp.linear_fc1", "mlp.linear_fc2")):
        yield from dense(own, arrays, f"{released}Dense_{number}/")


def _attention(own: str, arrays: Arrays, released: str) -> Named:
    parts = ("query", "key", "value")
    kernels = [_tensor(arrays, f"{released}{part}/kernel").permute(1, 2, 0) for part in parts]
    num_heads = len(kernels[0])
    query, key, value = (kernel.flatten(0, 1) for kernel in kernels)
    yield f"{own}.linear_qkv.weight", join_heads(query, key, value, num_heads)
    yield f"{own}.linear_proj.weight", _tensor(arrays, f"{released}out/kernel").flatten(0, 1).t()
    if f"{released}query/bias" in arrays:
        query, key, value = (_tensor(arrays, f"{released}{part}/bias").flatten() for part in parts)
        yield f"{own}.linear_qkv.bias", join_heads(query, key, value, num_heads)
        yield f"{own}.linear_proj.bias", _tensor(arrays, f"{released}out/bias")


def _tensor(arrays: Arrays, name: str) -> Tensor:
    if name not in arrays:
        raise UserError(f"a layer of the file has no {name}; is it a complete released GIVT?")
    return torch.from_numpy(np.array(arrays[name], np.float32))
