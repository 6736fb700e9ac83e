"""`ViTMAEForPreTraining` of `transformers`, as an MAE and back.

Legend: n patches, h hidden size, w width of the decoder.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megavis.config.errors import UserError
from megavis.config.schema import ModelConfig, RunConfig
from megavis.grammar.boundaries import context_size
from megavis.grammar.words import DecoderConfig
from megavis.model.positions import cell_coordinates, sincos
from megavis.papers.mae.config import MAEConfig
from megavis.weights.released import (
    SETTINGS,
    Released,
    ReleasedTensors,
    check_divides,
    check_sizes,
    read_hub_folder,
)
from megavis.weights.tables import (
    TOKEN,
    Layout,
    Row,
    Table,
    layer,
    patches,
    read_table,
    with_blank_row,
)
from megavis.weights.vits import (
    IMAGENET,
    TRANSFORMERS,
    check_vit_settings,
    read_statistics,
    vit_model,
    vit_sizes,
    with_older_names,
)

MODEL = "ViTMAEForPreTraining"
_POSITIONS = ("embedding.positions.weight", "bridge.positions.weight")
_TABLES = ("vit.embeddings.position_embeddings", "decoder.decoder_pos_embed")
_SIZES = ("num_hidden_layers", "hidden_size", "num_attention_heads", "intermediate_size")
# Our class token is [1, h], with the position that theirs adds to it.
_FRONT = Layout(
    lambda token, table: (token[0] + table[0][0], table[0, 1:]),
    lambda front, positions: (front.view(1, 1, -1), with_blank_row(positions)),
)


def vit_mae_table(settings: Mapping[str, Any]) -> Table:
    """Return the names of an MAE with tables of positions, and ViTMAE's, for a `config.json`."""
    embedding = "embeddings.patch_embeddings.projection"
    table = [
        Row(("embedding.front", _POSITIONS[0]), ("vit.embeddings.cls_token", _TABLES[0]), _FRONT),
        Row("bridge.mask", "decoder.mask_token", TOKEN),
        Row(_POSITIONS[1], _TABLES[1], Layout(lambda table: table[0, 1:], with_blank_row)),
        Row(
            "embedding.content.weight",
            f"vit.{embedding}.weight",
            patches(settings["patch_size"]),
        ),
        Row("embedding.content.bias", f"vit.{embedding}.bias"),
        *layer("bridge.norm", "vit.layernorm"),
        *layer("bridge.linear", "decoder.decoder_embed"),
        *layer("head.norm", "decoder.decoder_norm"),
        *layer("head.linear", "decoder.decoder_pred"),
    ]
    for ours, theirs, part in (
        ("blocks", "vit.encoder.layer", ""),
        ("decoder", "decoder.decoder_layers", "decoder_"),
    ):
        for number in range(settings[f"{part}num_hidden_layers"]):
            heads = settings[f"{part}num_attention_heads"]
            table += TRANSFORMERS.block(f"{ours}.{number}", f"{theirs}.{number}", heads)
    return table


def from_vit_mae(tensors: Mapping[str, Tensor], settings: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return MAE's float32 tensors; without tables of positions if they are sin-cos."""
    weights = read_table(vit_mae_table(settings), tensors)
    if has_sines(tensors, settings):
        weights = {name: each for name, each in weights.items() if name not in _POSITIONS}
    return weights


def sines(settings: Mapping[str, Any], scale: float = 1.0) -> dict[str, Tensor]:
    """Return the sin-cos positions of encoder and decoder, `[n, h]` and `[n, w]`, by our names."""
    side = settings["image_size"] // settings["patch_size"]
    cells = scale * cell_coordinates(torch.arange(side**2), side)
    widths = (settings["hidden_size"], settings["decoder_hidden_size"])
    return {name: sincos(cells, width) for name, width in zip(_POSITIONS, widths, strict=True)}


def has_sines(tensors: Mapping[str, Tensor], settings: Mapping[str, Any]) -> bool:
    """Return True if both tables contain the sin-cos positions of MAE."""
    return all(
        tensors[name][0, 1:].shape == table.shape
        and torch.allclose(tensors[name][0, 1:].float(), table, rtol=0, atol=1e-5)
        for name, table in zip(_TABLES, sines(settings).values(), strict=True)
    )


def fits_vit_mae(config: RunConfig) -> MAEConfig:
    """Return the `objective` section of a run that can be converted.

    Raises:
        UserError: it is not an MAE pretraining run with a class token and the layers of a ViT.
    """
    paper, model = config.objective, config.model
    if not isinstance(paper, MAEConfig) or config.finetune is not None:
        raise UserError("only a pretrained MAE can be converted")
    if not paper.class_token:
        raise UserError("ViTMAE has a class token; objective.class_token is false")
    kinds = (model.normalization, model.activation, model.add_bias, model.has_biased_attention)
    if model.qk_norm:
        raise UserError("ViTMAE does not normalise queries and keys; model.qk_norm is true")
    if kinds != ("layer_norm", "gelu", True, True) or model.norm_bias != "all":
        raise UserError("needs model.normalization layer_norm, activation gelu, add_bias true")
    if model.positions not in (None, "learned", "sincos", "learned_sincos"):
        raise UserError(f"ViTMAE adds its positions; model.positions is {model.positions}")
    return paper


def vit_mae_settings(config: RunConfig) -> dict[str, Any]:
    """Return the `config.json` of a run; raises UserError as `fits_vit_mae`."""
    paper = fits_vit_mae(config)
    count = paper.num_patches(config)
    visible, ratio = context_size(count, paper.mask_ratio), paper.mask_ratio
    if int(count * (1 - ratio)) != visible:
        # transformers rounds the number of visible patches down.
        ratio = 1 - (visible + 0.5) / count
    return {
        "architectures": [MODEL],
        "model_type": "vit_mae",
        **vit_sizes(config, num_layers=config.model.num_layers, patch_size=paper.patch_size),
        "decoder_num_attention_heads": paper.decoder.num_attention_heads,
        "decoder_hidden_size": paper.decoder.hidden_size,
        "decoder_num_hidden_layers": paper.decoder.num_layers,
        "decoder_intermediate_size": 4 * paper.decoder.hidden_size,
        "mask_ratio": ratio,
        "norm_pix_loss": paper.normalize_targets,
    }


def vit_mae_sections(
    settings: Mapping[str, Any], *, has_tables: bool
) -> tuple[MAEConfig, ModelConfig]:
    """Return the sections `objective` and `model` for a folder's `config.json`."""
    count, ratio = (settings["image_size"] // settings["patch_size"]) ** 2, settings["mask_ratio"]
    visible = int(count * (1 - ratio))
    paper = MAEConfig(
        patch_size=settings["patch_size"],
        mask_ratio=ratio if context_size(count, ratio) == visible else 1 - visible / count,
        normalize_targets=settings["norm_pix_loss"],
        decoder=DecoderConfig(
            num_layers=settings["decoder_num_hidden_layers"],
            hidden_size=settings["decoder_hidden_size"],
            num_attention_heads=settings["decoder_num_attention_heads"],
        ),
    )
    return paper, vit_model(settings, "learned" if has_tables else "sincos")


def read_vit_mae(args: argparse.Namespace) -> Released:
    """Read a folder.

    Raises:
        UserError: it is not such a folder.
    """
    settings, tensors = read_hub_folder(
        args.source, model=MODEL, kind="vit_mae", renamed=with_older_names
    )
    _check_settings(args.source / SETTINGS, settings)
    _check_decoder_positions(tensors)
    _check_statistics(args.source)
    is_fixed = has_sines(tensors, settings)
    paper, model = vit_mae_sections(settings, has_tables=not is_fixed)
    return Released(
        paper,
        tensors,
        vit_mae_table(settings),
        image_size=settings["image_size"],
        sections={"model": model},
        derived=lambda _: sines(settings) if is_fixed else {},
    )


def _check_settings(path: Path, settings: Mapping[str, Any]) -> None:
    """Raise UserError if a folder's settings do not describe our MAE."""
    check_vit_settings(path, settings)
    check_sizes(path, settings, *(f"decoder_{key}" for key in _SIZES))
    check_divides(path, settings, "decoder_hidden_size", "decoder_num_attention_heads")
    width, name = settings["decoder_hidden_size"], "decoder_intermediate_size"
    if settings[name] != 4 * width:
        raise UserError(
            f"{path}: {name} is {settings[name]}; only 4 × decoder_hidden_size, {4 * width}, can be"
            " imported"
        )
    ratio, is_relative = settings.get("mask_ratio"), settings.get("norm_pix_loss")
    if not isinstance(ratio, float | int) or not 0 <= ratio < 1:
        raise UserError(f"{path}: mask_ratio is {ratio!r}, not a number in [0, 1)")
    if not isinstance(is_relative, bool):
        raise UserError(f"{path}: norm_pix_loss is {is_relative!r}, neither true nor false")


def _check_decoder_positions(tensors: ReleasedTensors) -> None:
    if tensors[_TABLES[1]][0, 0].any():
        raise UserError(
            f"{tensors.source}: decoder.decoder_pos_embed has a position for the class token, which"
            " MAE does not"
        )


def _check_statistics(folder: Path) -> None:
    for found, ours in zip(read_statistics(folder), IMAGENET, strict=True):
        if any(abs(a - b) > 1e-6 for a, b in zip(found, ours, strict=True)):
            raise UserError(
                f"{folder / 'preprocessor_config.json'}: pixels are standardised by"
                f" {[round(value, 4) for value in found]}; MAE of megavis has ImageNet's"
                f" {list(ours)}, and its targets would differ"
            )
