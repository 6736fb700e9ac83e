"""Features of an exported run in plain PyTorch; model cards contain the source below."""

import json
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file


def swiglu(x: torch.Tensor) -> torch.Tensor:
    """Return SiLU(gate) · value of alternating gates and values."""
    return F.silu(x[..., ::2]) * x[..., 1::2]


ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "quick_gelu": lambda x: x * torch.sigmoid(1.702 * x),
    "swiglu": swiglu,
}


def features(folder: str, tokens: torch.Tensor) -> torch.Tensor:
    """Return features `[b, s, h]`, the head's input, of ids `[b, n]` or vectors `[b, n, d]`."""
    c = json.loads((Path(folder) / "config.json").read_text())["plain"]
    w = load_file(Path(folder) / "model.safetensors")

    def linear(x: torch.Tensor, name: str) -> torch.Tensor:
        return F.linear(x, w[f"{name}.weight"], w.get(f"{name}.bias"))

    def norm(x: torch.Tensor, name: str) -> torch.Tensor:
        gain, bias = w[f"{name}.weight"], w.get(f"{name}.bias")
        if c["normalization"] == "rms_norm":
            return F.rms_norm(x, gain.shape, gain, c["epsilon"])
        return F.layer_norm(x, gain.shape, gain, bias, c["epsilon"])

    def turn(x: torch.Tensor) -> torch.Tensor:  # rotary positions
        pairs = torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous())
        return torch.view_as_real(pairs * w["plain.turns"]).flatten(-2)

    rows, first, heads = w["plain.rows"], c["first"], c["heads"]
    tokens = tokens[:, w["plain.order"]][:, : len(rows) - first]
    x = w[f"{c['content']}.weight"][tokens] if tokens.ndim == 2 else linear(tokens, c["content"])
    if f"{c['content']}.norm.weight" in w:
        x = norm(x, f"{c['content']}.norm")
    x, mask = F.pad(x, (0, 0, first, 0)) + rows, w.get("plain.mask")
    for i in range(c["layers"]):
        y = norm(x, f"blocks.{i}.input_layernorm")
        y = linear(y, f"blocks.{i}.self_attention.linear_qkv").unflatten(-1, (heads, 3, -1))
        q, k, v = y.permute(3, 0, 2, 1, 4)
        if "plain.turns" in w:
            q, k = turn(q), turn(k)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=c["causal"])
        x = x + linear(y.transpose(1, 2).flatten(2), f"blocks.{i}.self_attention.linear_proj")
        y = linear(norm(x, f"blocks.{i}.pre_mlp_layernorm"), f"blocks.{i}.mlp.linear_fc1")
        y = ACTIVATIONS[c["activation"]](y)
        x = x + linear(y, f"blocks.{i}.mlp.linear_fc2")
    return norm(x, c["norm"])
