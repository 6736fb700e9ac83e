"""Convert ImageGPT weights of `transformers` to iGPT's and back.

ImageGPT has a vocabulary of colours + 1 with the start token last, matrices stored as in × out
(one for queries, keys and values), and biases on every projection, which are zero in the released
weights.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from megavis.config.errors import UserError
from megavis.config.schema import RunConfig
from megavis.model.attention import join_keys_values, split_keys_values
from megavis.papers.igpt.config import IGPTConfig

_PREFIX = "transformer."

# megavis' name in a block, ImageGPT's, and whether the matrix is transposed.
_PLAIN = (
    ("input_layernorm.weight", "ln_1.weight", False),
    ("pre_mlp_layernorm.weight", "ln_2.weight", False),
    ("self_attention.linear_proj.weight", "attn.c_proj.weight", True),
    ("self_attention.linear_proj.bias", "attn.c_proj.bias", False),
    ("mlp.linear_fc1.weight", "mlp.c_fc.weight", True),
    ("mlp.linear_fc1.bias", "mlp.c_fc.bias", False),
    ("mlp.linear_fc2.weight", "mlp.c_proj.weight", True),
    ("mlp.linear_fc2.bias", "mlp.c_proj.bias", False),
)
_BIASES = ("attn.c_attn.bias", "attn.c_proj.bias", "mlp.c_fc.bias", "mlp.c_proj.bias")


def fits_imagegpt(config: RunConfig) -> int:
    """Return the number of colours of a run that can be converted.

    Raises:
        UserError: it is not an autoregressive iGPT in raster order, or has other layers.
    """
    paper, model = config.objective, config.model
    if not isinstance(paper, IGPTConfig) or paper.mode != "autoregressive":
        raise UserError("only an autoregressive iGPT can be converted")
    if paper.order != "raster":
        raise UserError("ImageGPT predicts pixels in raster order; this run does not")
    if model.positions not in (None, "learned"):
        raise UserError(f"ImageGPT has learned positions; model.positions is {model.positions}")
    if (model.normalization, model.activation) != ("rms_norm", "quick_gelu"):
        raise UserError("needs model.normalization rms_norm, activation quick_gelu")
    return paper.vocabulary_size


def has_biases(released: Mapping[str, Tensor]) -> bool:
    """Return True if any bias of a projection is nonzero."""
    return any(bool(tensor.any()) for name, tensor in released.items() if name.endswith(_BIASES))


def model_section(settings: Mapping[str, Any], *, add_bias: bool) -> dict[str, Any]:
    """Return the config's `model` section for the folder's `config.json`.

    Raises:
        UserError: a setting is not supported by iGPT's layers.
    """
    for key, wanted in (
        ("activation_function", "quick_gelu"),
        ("scale_attn_by_inverse_layer_idx", False),
        ("scale_attn_weights", True),
        ("tie_word_embeddings", False),
    ):
        if settings.get(key, wanted) != wanted:
            raise UserError(f"config.json: {key} is {settings[key]!r}; iGPT has {wanted!r}")
    return {
        "num_layers": settings["n_layer"],
        "hidden_size": settings["n_embd"],
        "num_attention_heads": settings["n_head"],
        "ffn_hidden_size": settings.get("n_inner") or 4 * settings["n_embd"],
        "norm_epsilon": settings.get("layer_norm_epsilon", 1e-5),
        "add_bias": add_bias,
    }


def from_imagegpt(released: Mapping[str, Tensor], *, num_heads: int) -> dict[str, Tensor]:
    """Convert an ImageGPT state dict.

    Args:
        released: tensors under ImageGPT's names.
        num_heads: attention heads.

    Returns:
        float32 tensors under megavis' names; biases only if any is nonzero.

    Raises:
        UserError: a tensor is missing.
    """
    biased = has_biases(released)
    embedding = _take(released, f"{_PREFIX}wte.weight")
    whole = {
        "embedding.tokens.weight": embedding[:-1],
        "embedding.start": embedding[-1],
        "embedding.positions.weight": _take(released, f"{_PREFIX}wpe.weight"),
        "head.norm.weight": _take(released, f"{_PREFIX}ln_f.weight"),
        "head.linear.weight": _take(released, "lm_head.weight"),
    }
    for layer in range(_num_layers(released)):
        old, new = f"{_PREFIX}h.{layer}.", f"blocks.{layer}."
        for ours, theirs, turned in _PLAIN:
            if biased or not ours.endswith("bias"):
                tensor = _take(released, old + theirs)
                whole[new + ours] = tensor.t() if turned else tensor
        kinds = ("weight", "bias") if biased else ("weight",)
        for kind in kinds:
            together = _take(released, f"{old}attn.c_attn.{kind}")
            query, keys, values = together.t().chunk(3)
            pairs = join_keys_values(keys, values, num_heads)
            whole[f"{new}self_attention.linear_q.{kind}"] = query
            whole[f"{new}self_attention.linear_kv.{kind}"] = pairs
    return {name: tensor.float().contiguous() for name, tensor in whole.items()}


def to_imagegpt(whole: Mapping[str, Tensor], *, num_heads: int) -> dict[str, Tensor]:
    """Invert `from_imagegpt`; biases that the model lacks become zeros."""
    tokens, start = whole["embedding.tokens.weight"], whole["embedding.start"]
    released = {
        f"{_PREFIX}wte.weight": torch.cat([tokens, start[None]]),
        f"{_PREFIX}wpe.weight": whole["embedding.positions.weight"],
        f"{_PREFIX}ln_f.weight": whole["head.norm.weight"],
        "lm_head.weight": whole["head.linear.weight"],
    }
    layers = {int(m.group(1)) for name in whole if (m := re.match(r"blocks\.(\d+)\.", name))}
    for layer in sorted(layers):
        old, new = f"{_PREFIX}h.{layer}.", f"blocks.{layer}."
        for ours, theirs, turned in _PLAIN:
            tensor = whole.get(new + ours)
            if tensor is None:
                tensor = torch.zeros(len(whole[new + ours.replace("bias", "weight")]))
            released[old + theirs] = tensor.t() if turned else tensor
        for kind in ("weight", "bias"):
            query = whole.get(f"{new}self_attention.linear_q.{kind}")
            if query is None:
                together = torch.zeros(3 * tokens.shape[1])
            else:
                pairs = whole[f"{new}self_attention.linear_kv.{kind}"]
                together = torch.cat([query, *split_keys_values(pairs, num_heads)]).t()
            released[f"{old}attn.c_attn.{kind}"] = together
    return {name: tensor.float().contiguous() for name, tensor in released.items()}


def _num_layers(released: Mapping[str, Tensor]) -> int:
    pattern = re.compile(rf"{re.escape(_PREFIX)}h\.(\d+)\.ln_1\.weight")
    return sum(pattern.fullmatch(name) is not None for name in released)


def _take(released: Mapping[str, Tensor], name: str) -> Tensor:
    if name not in released:
        raise UserError(f"the folder's weights have no {name}; is it an ImageGPT folder?")
    return released[name]
