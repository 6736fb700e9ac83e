"""ImageGPT of `transformers`, as an iGPT and back.

ImageGPT has a vocabulary of colours + 1 with the start token last, matrices stored as in × out
(one for queries, keys and values), and biases on every projection, which are zero in the released
weights.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megavis.config.errors import UserError
from megavis.config.schema import ModelConfig, RunConfig
from megavis.papers.igpt.config import IGPTConfig
from megavis.tokenizers.palette import Palette
from megavis.weights.released import (
    SETTINGS,
    Released,
    ReleasedTensors,
    check_divides,
    check_fixed,
    check_sizes,
    read_hub_folder,
    read_json,
)
from megavis.weights.tables import (
    TRANSPOSED,
    Layout,
    Row,
    Table,
    count,
    joined_heads,
    layer,
    read_table,
)

MODEL = "ImageGPTForCausalImageModeling"
CENTERS, PROCESSOR = "kmeans_centers.npy", "preprocessor_config.json"
_BIASES = ("attn.c_attn.bias", "attn.c_proj.bias", "mlp.c_fc.bias", "mlp.c_proj.bias")
# The causal mask, which older versions of transformers save as a buffer.
_MASKS = r"transformer\.h\.\d+\.attn\.(bias|masked_bias)$"
_FIXED = {
    "activation_function": "quick_gelu",
    "scale_attn_by_inverse_layer_idx": False,
    "scale_attn_weights": True,
}
_VOCABULARY = Layout(
    lambda table: (table[:-1], table[-1]),
    lambda tokens, start: torch.cat([tokens, start[None]]),
)


def imagegpt_table(num_layers: int, num_heads: int) -> Table:
    """Return the names of an iGPT with biases, and ImageGPT's."""
    table = [
        Row(("embedding.content.weight", "embedding.start"), "transformer.wte.weight", _VOCABULARY),
        Row("embedding.positions.weight", "transformer.wpe.weight"),
        Row("head.norm.weight", "transformer.ln_f.weight"),
        Row("head.linear.weight", "lm_head.weight"),
    ]
    joined = joined_heads(num_heads, parts=1, stored=TRANSPOSED)
    for number in range(num_layers):
        ours, theirs = f"blocks.{number}", f"transformer.h.{number}"
        table += [
            Row(f"{ours}.input_layernorm.weight", f"{theirs}.ln_1.weight"),
            Row(f"{ours}.pre_mlp_layernorm.weight", f"{theirs}.ln_2.weight"),
            *layer(f"{ours}.self_attention.linear_qkv", f"{theirs}.attn.c_attn", joined),
            *layer(f"{ours}.self_attention.linear_proj", f"{theirs}.attn.c_proj", TRANSPOSED),
            *layer(f"{ours}.mlp.linear_fc1", f"{theirs}.mlp.c_fc", TRANSPOSED),
            *layer(f"{ours}.mlp.linear_fc2", f"{theirs}.mlp.c_proj", TRANSPOSED),
        ]
    return table


def from_imagegpt(tensors: Mapping[str, Tensor], *, num_heads: int) -> dict[str, Tensor]:
    """Return iGPT's float32 tensors; biases only if any is nonzero."""
    weights = read_table(imagegpt_table(count(tensors, "transformer.h."), num_heads), tensors)
    if has_biases(tensors):
        return weights
    return {name: tensor for name, tensor in weights.items() if not name.endswith(".bias")}


def has_biases(tensors: Mapping[str, Tensor]) -> bool:
    """Return True if any bias of a projection is nonzero."""
    return any(bool(tensor.any()) for name, tensor in tensors.items() if name.endswith(_BIASES))


def zero_biases(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return zeros for the biases of projections, as far as an iGPT has none."""
    matrices = {
        name.replace("weight", "bias"): matrix
        for name, matrix in weights.items()
        if name.startswith("blocks.") and matrix.ndim == 2
    }
    return {
        name: matrix.new_zeros(len(matrix))
        for name, matrix in matrices.items()
        if name not in weights
    }


def fits_imagegpt(config: RunConfig) -> int:
    """Return the number of colours of a run that can be converted.

    Raises:
        UserError: it is not an autoregressive iGPT in raster order, or has other layers.
    """
    paper, model = config.objective, config.model
    if not isinstance(paper, IGPTConfig):
        raise UserError("only an iGPT can be converted")
    if config.finetune is not None:
        raise UserError(
            "ImageGPTForCausalImageModeling predicts colours; a fine-tuned run does not"
        )
    if paper.mode != "autoregressive":
        raise UserError(f"ImageGPT is autoregressive; objective.mode is {paper.mode}")
    if paper.order != "raster":
        raise UserError("ImageGPT predicts pixels in raster order; this run does not")
    if model.positions not in (None, "learned"):
        raise UserError(f"ImageGPT has learned positions; model.positions is {model.positions}")
    if (model.normalization, model.activation) != ("rms_norm", "quick_gelu"):
        raise UserError("needs model.normalization rms_norm, activation quick_gelu")
    if model.qk_norm:
        raise UserError("ImageGPT does not normalise queries and keys; model.qk_norm is true")
    return paper.vocabulary_size


def imagegpt_settings(config: RunConfig) -> dict[str, Any]:
    """Return the `config.json` of a run; raises UserError as `fits_imagegpt`."""
    model = config.model
    return {
        "architectures": [MODEL],
        "model_type": "imagegpt",
        "activation_function": "quick_gelu",
        "vocab_size": fits_imagegpt(config) + 1,
        "n_positions": config.data.image_size**2,
        "n_embd": model.hidden_size,
        "n_inner": model.mlp_size,
        "n_layer": model.num_layers,
        "n_head": model.num_attention_heads,
        "layer_norm_epsilon": model.norm_epsilon,
        "tie_word_embeddings": False,
    }


def read_imagegpt(args: argparse.Namespace) -> Released:
    """Read a folder.

    Raises:
        UserError: it is not such a folder, or its palette does not fit.
    """
    settings, tensors = read_hub_folder(args.source, model=MODEL, kind="imagegpt")
    path = args.source / SETTINGS
    check_sizes(path, settings, "n_layer", "n_embd", "n_head", "n_positions", "vocab_size")
    check_divides(path, settings, "n_embd", "n_head")
    check_fixed(path, settings, _FIXED)
    side, is_tied = math.isqrt(settings["n_positions"]), bool(settings.get("tie_word_embeddings"))
    if side * side != settings["n_positions"]:
        raise UserError(f"{path}: n_positions {settings['n_positions']} is not a square image")
    if is_tied:
        _untie(tensors)
    num_colors = settings["vocab_size"] - 1
    model = ModelConfig(
        num_layers=settings["n_layer"],
        hidden_size=settings["n_embd"],
        num_attention_heads=settings["n_head"],
        ffn_hidden_size=settings.get("n_inner") or 4 * settings["n_embd"],
        norm_epsilon=settings.get("layer_norm_epsilon", 1e-5),
        add_bias=has_biases(tensors),
    )
    return Released(
        IGPTConfig(vocabulary_size=num_colors),
        tensors,
        imagegpt_table(settings["n_layer"], settings["n_head"]),
        image_size=side,
        sections={"model": model},
        derived=zero_biases,
        ignored=_MASKS,
        palette=_palette(args, num_colors),
        note=_TIED if is_tied else "",
    )


_TIED = (
    "The folder ties the head to the embedding: the run's head starts as a copy of the colours'"
    " embeddings, without the start token, and further training changes each by itself"
)


def _untie(tensors: ReleasedTensors) -> None:
    """Give the tensors a head for the colours, which is their embedding.

    transformers ties the head to the whole embedding: it predicts the start token too.

    Raises:
        UserError: the folder has a head of its own.
    """
    embedding, head = tensors["transformer.wte.weight"], tensors.get("lm_head.weight")
    if head is not None and not any(torch.equal(head, e) for e in (embedding, embedding[:-1])):
        raise UserError(
            f"{tensors.source}: tie_word_embeddings is true in config.json, and lm_head.weight"
            " differs from transformer.wte.weight; which of them is the head?"
        )
    tensors["lm_head.weight"] = embedding[:-1].clone()


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


def read_clusters(folder: Path) -> Palette | None:
    """Return the palette in a folder, or None.

    It is in `kmeans_centers.npy`, as released by OpenAI, or in `preprocessor_config.json`, as saved
    by transformers: `[k, 3]` in [-1, 1].

    Raises:
        UserError: the file contains something else.
    """
    centers, processor = folder / CENTERS, folder / PROCESSOR
    if centers.exists():
        return Palette.load(centers)
    clusters = read_json(processor).get("clusters") if processor.exists() else None
    if clusters is None:
        return None
    try:
        return Palette(np.array(clusters, dtype=np.float32))
    except (ValueError, TypeError, UserError) as error:
        raise UserError(f"{processor}: clusters: {error}") from None
