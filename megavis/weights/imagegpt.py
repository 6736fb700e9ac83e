"""Convert ImageGPT weights of `transformers` to iGPT's and back, and read and write its folders.

ImageGPT has a vocabulary of colours + 1 with the start token last, matrices stored as in × out
(one for queries, keys and values), and biases on every projection, which are zero in the released
weights.

Legend: b images, n pixels, v colours.
"""

from __future__ import annotations

import argparse
import json
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from megavis.checkpoint.format.tensor_files import save_tensors
from megavis.config.errors import UserError
from megavis.config.schema import ModelConfig, RunConfig
from megavis.model.attention import join_heads, split_heads
from megavis.papers.igpt.config import IGPTConfig
from megavis.tokenizers.palette import Palette
from megavis.weights.released import (
    Compared,
    OpenedRun,
    ReleasedRun,
    read_hub_weights,
    read_json,
)
from megavis.weights.vit_settings import check_shapes

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

    Returns:
        float32 tensors under megavis' names; biases only if any is nonzero.

    Raises:
        UserError: a tensor is missing.
    """
    biased = has_biases(released)
    embedding = _take(released, f"{_PREFIX}wte.weight")
    whole = {
        "embedding.content.weight": embedding[:-1],
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
            query, key, value = together.t().chunk(3)
            joined = join_heads(query, key, value, num_heads)
            whole[f"{new}self_attention.linear_qkv.{kind}"] = joined
    return {name: tensor.float().contiguous() for name, tensor in whole.items()}


def to_imagegpt(whole: Mapping[str, Tensor], *, num_heads: int) -> dict[str, Tensor]:
    """Invert `from_imagegpt`; biases that the model lacks become zeros."""
    tokens, start = whole["embedding.content.weight"], whole["embedding.start"]
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
            joined = whole.get(f"{new}self_attention.linear_qkv.{kind}")
            if joined is None:
                together = torch.zeros(3 * tokens.shape[1])
            else:
                together = torch.cat(split_heads(joined, num_heads)).t()
            released[f"{old}attn.c_attn.{kind}"] = together
    return {name: tensor.float().contiguous() for name, tensor in released.items()}


def _num_layers(released: Mapping[str, Tensor]) -> int:
    pattern = re.compile(rf"{re.escape(_PREFIX)}h\.(\d+)\.ln_1\.weight")
    return sum(pattern.fullmatch(name) is not None for name in released)


def _take(released: Mapping[str, Tensor], name: str) -> Tensor:
    if name not in released:
        raise UserError(f"the folder's weights have no {name}; is it an ImageGPT folder?")
    return released[name]


CENTERS_NAME = "kmeans_centers.npy"
_PROCESSOR_NAME = "preprocessor_config.json"
_BICUBIC = 3  # PIL.Image.Resampling.BICUBIC


def read_folder(folder: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return `config.json` and the tensors of `model.safetensors`, or of several such files.

    Raises:
        UserError: either is missing, unreadable or does not fit the other; pickled weights are not
            opened.
    """
    path = folder / "config.json"
    settings = read_json(path)
    kind = settings.get("model_type", "imagegpt")
    if kind != "imagegpt":
        raise UserError(f"{path}: this is a folder of {kind!r}, not of 'imagegpt'")
    tensors = read_hub_weights(folder)
    if settings.get("tie_word_embeddings"):
        tensors = _untied(tensors, folder)
    _check_fit(settings, tensors, path)
    return settings, tensors


def _untied(tensors: Mapping[str, Tensor], folder: Path) -> dict[str, Tensor]:
    """Return the tensors with a head for the colours, which is their embedding.

    transformers ties the head to the whole embedding: it predicts the start token too.

    Raises:
        UserError: the folder has a head of its own.
    """
    embedding, head = tensors.get("transformer.wte.weight"), tensors.get("lm_head.weight")
    if embedding is None:
        return dict(tensors)
    if head is not None and not any(torch.equal(head, e) for e in (embedding, embedding[:-1])):
        raise UserError(
            f"{folder}: tie_word_embeddings is true in config.json, and lm_head.weight differs from"
            " transformer.wte.weight; which of them is the head?"
        )
    return {**tensors, "lm_head.weight": embedding[:-1].clone()}


def _check_fit(settings: Mapping[str, Any], tensors: Mapping[str, Tensor], path: Path) -> None:
    """Raise UserError if sizes are missing or do not match the weights."""
    for key in ("n_layer", "n_embd", "n_head", "n_positions", "vocab_size"):
        if not isinstance(settings.get(key), int) or settings[key] < 1:
            raise UserError(f"{path}: {key} is {settings.get(key)!r}, not a positive integer")
    width, vocabulary = settings["n_embd"], settings["vocab_size"]
    if width % settings["n_head"]:
        raise UserError(f"{path}: n_embd {width} is not divisible by n_head {settings['n_head']}")
    shapes = {
        "transformer.wte.weight": (vocabulary, width),
        "transformer.wpe.weight": (settings["n_positions"], width),
        "lm_head.weight": (vocabulary - 1, width),
    }
    for layer in range(settings["n_layer"]):
        shapes[f"transformer.h.{layer}.attn.c_attn.weight"] = (width, 3 * width)
    check_shapes(
        path.parent,
        tensors,
        shapes,
        wanted="ImageGPTForCausalImageModeling",
        settings=settings,
    )
    if f"transformer.h.{settings['n_layer']}.ln_1.weight" in tensors:
        raise UserError(f"{path}: n_layer is {settings['n_layer']}; the weights have more layers")


def read_clusters(folder: Path) -> Palette | None:
    """Return the palette in a folder, or None.

    It is in `kmeans_centers.npy`, as released by OpenAI, or in `preprocessor_config.json`, as saved
    by transformers: `[k, 3]` in [-1, 1].

    Raises:
        UserError: the file contains something else.
    """
    centers, processor = folder / CENTERS_NAME, folder / _PROCESSOR_NAME
    if centers.exists():
        return Palette.load(centers)
    clusters = read_json(processor).get("clusters") if processor.exists() else None
    if clusters is None:
        return None
    try:
        return Palette(np.array(clusters, dtype=np.float32))
    except (ValueError, TypeError, UserError) as error:
        raise UserError(f"{processor}: clusters: {error}") from None


def write_folder(
    folder: Path,
    settings: Mapping[str, Any],
    tensors: dict[str, Tensor],
    *,
    palette: Palette | None = None,
) -> None:
    """Write config and weights, and the palette, if there is one, in both formats."""
    folder.mkdir(parents=True, exist_ok=True)
    save_tensors(folder / "model.safetensors", tensors, {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(settings, indent=2) + "\n")
    if palette is None:
        return
    palette.save(folder / CENTERS_NAME)
    side = math.isqrt(settings["n_positions"])
    processor = {
        "image_processor_type": "ImageGPTImageProcessor",
        "do_resize": True,
        "size": {"height": side, "width": side},
        "resample": _BICUBIC,
        "do_normalize": True,
        "do_color_quantize": True,
        "clusters": palette.centers.tolist(),
    }
    (folder / _PROCESSOR_NAME).write_text(json.dumps(processor) + "\n")


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
    """Run the folder's model, independently of megavis' layers, to check a conversion.

    Args:
        tensors: tensors under ImageGPT's names.
        settings: `config.json`.
        ids: int64 `[b, n]`.

    Returns:
        Logits `[b, n, v]` of each pixel, given those before it.
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


def read_imagegpt(args: argparse.Namespace) -> ReleasedRun:
    """Convert a folder; logits of random ids `[b, n]` are compared.

    Raises:
        UserError: it is not such a folder, or its palette does not fit.
    """
    settings, tensors = read_folder(args.source)
    side = math.isqrt(settings["n_positions"])
    if side * side != settings["n_positions"]:
        raise UserError(f"config.json: n_positions {settings['n_positions']} is not a square image")
    num_colors = settings["vocab_size"] - 1

    def compare(run: OpenedRun) -> Compared:
        generator = torch.Generator().manual_seed(0)
        ids = torch.randint(num_colors, (2, settings["n_positions"]), generator=generator)
        yield run.outputs(ids), folder_logits(tensors, settings, ids)

    return ReleasedRun(
        IGPTConfig(vocabulary_size=num_colors),
        from_imagegpt(tensors, num_heads=settings["n_head"]),
        image_size=side,
        sections={"model": ModelConfig(**model_section(settings, add_bias=has_biases(tensors)))},
        palette=_palette(args, num_colors),
        compare=compare,
        compared="logits",
        note=_TIED if settings.get("tie_word_embeddings") else "",
    )


_TIED = (
    "The folder ties the head to the embedding: the run's head starts as a copy of the colours'"
    " embeddings, without the start token, and further training changes each by itself"
)


def _palette(args: argparse.Namespace, num_colors: int) -> Palette | None:
    """Return the named palette, or the folder's own; None if it has none."""
    given = args.palette is not None
    palette = Palette.load(args.palette) if given else read_clusters(args.source)
    if palette is not None and len(palette) > num_colors:
        raise UserError(
            f"{args.palette if given else args.source}: {len(palette)} colours, more than the"
            f" {num_colors} of the model"
        )
    return palette
