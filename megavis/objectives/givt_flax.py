"""Layers of GIVT's released Transformers, as Flax stores them, under megavis's names.

Kernels are stored input first, those of attention as width, heads, head size (the output's: heads,
head size, width).

Every function yields tensors by name, and raises UserError where an array is missing. `own` is the
layer's name in megavis, `released` what its arrays' names begin with.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from megavis.config.errors import UserError
from megavis.model.attention import join_keys_values
from megavis.objectives.givt_released import Arrays

Named = Iterator[tuple[str, Tensor]]


def block_weights(arrays: Arrays) -> Named:
    """Yield the tensors of a block that predicts tokens."""
    norms = {"input_layernorm": "LayerNorm1", "pre_mlp_layernorm": "LayerNorm3"}
    yield from _attention("self_attention", arrays, "SelfAttn/")
    if "CrossAttn/query/kernel" in arrays:
        norms["pre_cross_attn_layernorm"] = "LayerNorm2"
        yield from _attention("cross_attention", arrays, "CrossAttn/")
    for own, released in norms.items():
        yield from norm(own, arrays, f"{released}/")
    yield from _mlp(arrays, "MLP/")


def encoder_block_weights(arrays: Arrays) -> Named:
    """Yield the tensors of an encoder's block."""
    yield from _attention("self_attention", arrays, "MultiHeadDotProductAttention_0/")
    yield from norm("input_layernorm", arrays, "LayerNorm_0/")
    yield from norm("pre_mlp_layernorm", arrays, "LayerNorm_1/")
    yield from _mlp(arrays, "MlpBlock_0/")


def norm(own: str, arrays: Arrays, released: str = "") -> Named:
    """Yield gain and bias of a norm, those of them that the arrays hold."""
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
    yield f"{own}.linear_q.weight", query
    yield f"{own}.linear_kv.weight", join_keys_values(key, value, num_heads)
    yield f"{own}.linear_proj.weight", _tensor(arrays, f"{released}out/kernel").flatten(0, 1).t()
    if f"{released}query/bias" in arrays:
        query, key, value = (_tensor(arrays, f"{released}{part}/bias").flatten() for part in parts)
        yield f"{own}.linear_q.bias", query
        yield f"{own}.linear_kv.bias", join_keys_values(key, value, num_heads)
        yield f"{own}.linear_proj.bias", _tensor(arrays, f"{released}out/bias")


def _tensor(arrays: Arrays, name: str) -> Tensor:
    if name not in arrays:
        raise UserError(f"a layer of the file has no {name}; is it a released GIVT, and whole?")
    return torch.from_numpy(np.array(arrays[name], np.float32))
