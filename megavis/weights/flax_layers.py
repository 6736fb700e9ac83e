"""Tables of names of GIVT's released layers, which Flax stores.

Kernels are input first, and those of attention `[h, n, d]`, or `[n, d, h]` for the output. `ours`
and `theirs` are the names of a layer, or prefixes of its parts' names.

Legend: n heads, d head size, h hidden size.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

from megavis.model.adapter import Adapter
from megavis.weights.tables import SAME, TRANSPOSED, Layout, Row, count, joined_heads

CONVOLUTION = Layout(lambda x: x.permute(3, 2, 0, 1), lambda x: x.permute(2, 3, 1, 0))


def unstacked(tensors: Mapping[str, Tensor], prefix: str, *, axis: int = 0) -> dict[str, Tensor]:
    """Return the arrays with the blocks' unstacked, as in `encoder/encoderblock_3/...`.

    Args:
        prefix: of blocks, before their number. Stacked, they have none, nor an underscore.
        axis: on which they are stacked, if they are.
    """
    whole, found = f"{prefix.removesuffix('_')}/", dict[str, Tensor]()
    for name, tensor in tensors.items():
        if name.startswith(whole):
            inner = name.removeprefix(whole)
            parts = enumerate(tensor.unbind(axis))
            found |= {f"{prefix}{number}/{inner}": part for number, part in parts}
        else:
            found[name] = tensor
    return found


def dense(ours: str, theirs: str) -> list[Row]:
    """Return the rows of a linear layer."""
    return [
        Row(f"{ours}.weight", f"{theirs}/kernel", TRANSPOSED),
        Row(f"{ours}.bias", f"{theirs}/bias"),
    ]


def norm(ours: str, theirs: str, *, has_bias: bool = True) -> list[Row]:
    """Return the rows of a norm."""
    rows = [Row(f"{ours}.weight", f"{theirs}/scale"), Row(f"{ours}.bias", f"{theirs}/bias")]
    return rows if has_bias else rows[:1]


def attention(ours: str, theirs: str, num_heads: int, *, has_bias: bool) -> list[Row]:
    """Return the rows of an attention layer."""
    kernel = Layout(lambda x: x.flatten(1).t(), lambda x: x.t().unflatten(1, (num_heads, -1)))
    bias = Layout(lambda x: x.flatten(), lambda x: x.unflatten(0, (num_heads, -1)))
    output = Layout(lambda x: x.flatten(0, 1).t(), lambda x: x.t().unflatten(0, (num_heads, -1)))

    def parts(kind: str) -> tuple[str, ...]:
        return tuple(f"{theirs}/{part}/{kind}" for part in ("query", "key", "value"))

    qkv, proj = f"{ours}.linear_qkv", f"{ours}.linear_proj"
    rows = [
        Row(f"{qkv}.weight", parts("kernel"), joined_heads(num_heads, stored=kernel)),
        Row(f"{proj}.weight", f"{theirs}/out/kernel", output),
    ]
    if has_bias:
        rows += [
            Row(f"{qkv}.bias", parts("bias"), joined_heads(num_heads, stored=bias)),
            Row(f"{proj}.bias", f"{theirs}/out/bias"),
        ]
    return rows


def decoder_block(ours: str, theirs: str, num_heads: int, *, has_memory: bool) -> list[Row]:
    """Return the rows of a decoder block, with cross-attention if it has a memory."""
    norms = [("input_layernorm", "LayerNorm1"), ("pre_mlp_layernorm", "LayerNorm3")]
    layers = [("self_attention", "SelfAttn")]
    if has_memory:
        norms.append(("pre_cross_attn_layernorm", "LayerNorm2"))
        layers.append(("cross_attention", "CrossAttn"))
    rows: list[Row] = []
    for own, name in layers:
        rows += attention(f"{ours}.{own}", f"{theirs}/{name}", num_heads, has_bias=False)
    for own, name in norms:
        rows += norm(f"{ours}.{own}", f"{theirs}/{name}", has_bias=False)
    return rows + _mlp(ours, f"{theirs}/MLP")


def encoder_blocks(ours: str, theirs: str, tensors: Mapping[str, Tensor]) -> list[Row]:
    """Return the rows of all blocks of an encoder, whose names begin with these prefixes."""
    name, rows = "MultiHeadDotProductAttention_0", []
    num_heads = tensors[f"{theirs}0/{name}/query/kernel"].shape[1]
    for number in range(count(tensors, theirs)):
        own, block = f"{ours}{number}", f"{theirs}{number}"
        rows += attention(f"{own}.self_attention", f"{block}/{name}", num_heads, has_bias=True)
        rows += norm(f"{own}.input_layernorm", f"{block}/LayerNorm_0")
        rows += norm(f"{own}.pre_mlp_layernorm", f"{block}/LayerNorm_1")
        rows += _mlp(own, f"{block}/MlpBlock_0")
    return rows


def _mlp(ours: str, theirs: str) -> list[Row]:
    return [
        *dense(f"{ours}.mlp.linear_fc1", f"{theirs}/Dense_0"),
        *dense(f"{ours}.mlp.linear_fc2", f"{theirs}/Dense_1"),
    ]


def network_rows(
    network: nn.Module, renamed: Callable[[str], str], ours: str = "", theirs: str = ""
) -> list[Row]:
    """Return the rows of a network of convolutions and norms.

    Args:
        network: one of the same sizes, maybe on the meta device.
        renamed: the released name of a layer of ours.
        ours: prefix of our names.
        theirs: prefix of the released names.
    """
    rows = []
    for name, parameter in network.named_parameters():
        place, _, kind = name.rpartition(".")
        is_kernel = parameter.ndim == 4
        part = "kernel" if is_kernel else {"weight": "scale", "bias": "bias"}[kind]
        layout = CONVOLUTION if is_kernel else SAME
        rows.append(Row(f"{ours}{name}", f"{theirs}{renamed(place)}/{part}", layout))
    return rows


def adapter_rows(tensors: Mapping[str, Tensor], ours: str = "", theirs: str = "") -> list[Row]:
    """Return the rows of an adapter of the tensors' sizes."""
    _, _, half, hidden = tensors[f"{theirs}modules_0/Conv_0/kernel"].shape
    blocks = count(tensors, f"{theirs}modules_")
    with torch.device("meta"):
        adapter = Adapter(2 * half, num_blocks=blocks, bottleneck=2 * hidden)

    def renamed(place: str) -> str:
        place = re.sub(r"blocks\.(\d+)\.", r"modules_\1/", place)
        return place.replace("conv_", "Conv_").replace("norm_", "gn_")

    return network_rows(adapter, renamed, ours, theirs)
