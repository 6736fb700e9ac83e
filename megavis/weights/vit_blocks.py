"""Convert blocks of a Vision Transformer between libraries, and run them in plain PyTorch.

Legend: b images, s tokens, h hidden size, n heads, d head size.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from megavis.model.attention import join_heads, split_heads


@dataclass(frozen=True)
class BlockNames:
    """A library's names of the parts of a block.

    Attributes:
        plain: pairs of megavis' and the library's name.
        projections: names of the query, key and value projections: one stacked matrix, or three.
    """

    plain: tuple[tuple[str, str], ...]
    projections: tuple[str, ...]

    @property
    def all(self) -> tuple[str, ...]:
        """The library's names of all parts, each of which has a weight and a bias."""
        return (*self.projections, *(theirs for _, theirs in self.plain))


TIMM = BlockNames(
    (
        ("input_layernorm", "norm1"),
        ("self_attention.linear_proj", "attn.proj"),
        ("pre_mlp_layernorm", "norm2"),
        ("mlp.linear_fc1", "mlp.fc1"),
        ("mlp.linear_fc2", "mlp.fc2"),
    ),
    ("attn.qkv",),
)
# The names in files on the Hub, which all versions of transformers can read.
TRANSFORMERS = BlockNames(
    (
        ("input_layernorm", "layernorm_before"),
        ("self_attention.linear_proj", "attention.output.dense"),
        ("pre_mlp_layernorm", "layernorm_after"),
        ("mlp.linear_fc1", "intermediate.dense"),
        ("mlp.linear_fc2", "output.dense"),
    ),
    tuple(f"attention.attention.{part}" for part in ("query", "key", "value")),
)


_OLDER = (
    (r"^decoder\.decoder_encoder\.layer\.", "decoder.decoder_layers."),
    (r"^(vit\.)?layers\.", r"\1encoder.layer."),
    (r"\.attention\.q_proj\.", ".attention.attention.query."),
    (r"\.attention\.k_proj\.", ".attention.attention.key."),
    (r"\.attention\.v_proj\.", ".attention.attention.value."),
    (r"\.attention\.o_proj\.", ".attention.output.dense."),
    (r"\.mlp\.fc1\.", ".intermediate.dense."),
    (r"\.mlp\.fc2\.", ".output.dense."),
)
"""Names in transformers 5, of its modules or as it saves them, and those of transformers 4."""


def with_older_names(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Rename tensors of transformers 5 to the names that transformers 4 has, and keep others."""

    def older(name: str) -> str:
        for pattern, replacement in _OLDER:
            name = re.sub(pattern, replacement, name)
        return name

    return {older(name): tensor for name, tensor in tensors.items()}


def block_from(
    tensors: Mapping[str, Tensor], prefix: str, names: BlockNames, *, num_heads: int
) -> dict[str, Tensor]:
    """Convert a library's block, whose names begin with `prefix`, to megavis' names."""
    found = {}
    for kind in ("weight", "bias"):
        for ours, theirs in names.plain:
            found[f"{ours}.{kind}"] = tensors[f"{prefix}{theirs}.{kind}"]
        projections = _projections(tensors, prefix, names, kind)
        found[f"self_attention.linear_qkv.{kind}"] = join_heads(*projections, num_heads)
    return found


def block_to(
    whole: Mapping[str, Tensor], prefix: str, names: BlockNames, *, num_heads: int
) -> dict[str, Tensor]:
    """Convert megavis' block, whose names begin with `prefix`, to a library's names."""
    found = {}
    for kind in ("weight", "bias"):
        for ours, theirs in names.plain:
            found[f"{theirs}.{kind}"] = whole[f"{prefix}{ours}.{kind}"]
        joined = whole[f"{prefix}self_attention.linear_qkv.{kind}"]
        rows = torch.cat(split_heads(joined, num_heads))
        parts = rows.chunk(len(names.projections))
        for name, part in zip(names.projections, parts, strict=True):
            found[f"{name}.{kind}"] = part
    return found


def run_block(
    x: Tensor,
    tensors: Mapping[str, Tensor],
    prefix: str,
    names: BlockNames,
    *,
    num_heads: int,
    epsilon: float,
) -> Tensor:
    """Run a block with full attention on `[b, s, h]`, independently of megavis' layers."""

    def linear(x: Tensor, ours: str) -> Tensor:
        theirs = f"{prefix}{dict(names.plain)[ours]}"
        return F.linear(x, tensors[f"{theirs}.weight"], tensors[f"{theirs}.bias"])

    def norm(x: Tensor, ours: str) -> Tensor:
        theirs = f"{prefix}{dict(names.plain)[ours]}"
        shift = tensors[f"{theirs}.bias"]
        return F.layer_norm(x, x.shape[-1:], tensors[f"{theirs}.weight"], shift, epsilon)

    normed = norm(x, "input_layernorm")
    matrices, biases = (_projections(tensors, prefix, names, kind) for kind in ("weight", "bias"))
    query, key, value = (
        F.linear(normed, matrix, bias).unflatten(-1, (num_heads, -1)).transpose(1, 2)
        for matrix, bias in zip(matrices, biases, strict=True)
    )
    shares = (query @ key.mT / query.shape[-1] ** 0.5).softmax(-1)
    x = x + linear((shares @ value).transpose(1, 2).flatten(2), "self_attention.linear_proj")
    hidden = F.gelu(linear(norm(x, "pre_mlp_layernorm"), "mlp.linear_fc1"))
    return x + linear(hidden, "mlp.linear_fc2")


def _projections(
    tensors: Mapping[str, Tensor], prefix: str, names: BlockNames, kind: str
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the weights or biases of queries, keys and values."""
    rows = torch.cat([tensors[f"{prefix}{name}.{kind}"] for name in names.projections])
    query, key, value = rows.chunk(3)
    return query, key, value
