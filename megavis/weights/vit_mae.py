"""Convert MAE to `ViTMAEForPreTraining` of `transformers` and back, and run the latter.

Legend: b images, n patches, c of them visible, h hidden size, w width of the decoder.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megavis.composition.model import model_of
from megavis.config.errors import UserError
from megavis.config.schema import ModelConfig, RunConfig
from megavis.grammar.boundaries import context_size
from megavis.grammar.words import DecoderConfig
from megavis.model.positions import cell_coordinates, sincos
from megavis.papers.mae.config import MAEConfig
from megavis.tokenizers.patches import CHANNEL_DEVIATION, CHANNEL_MEAN, patchify, standardize
from megavis.weights.released import OpenedRun, ReleasedRun, random_images, read_hub_folder
from megavis.weights.vit_blocks import (
    TRANSFORMERS,
    block_from,
    block_to,
    run_block,
    with_older_names,
)
from megavis.weights.vit_settings import (
    check_depth,
    check_shapes,
    check_vit_settings,
    read_statistics,
    vit_shapes,
)

# megavis' and transformers' names of layers other than blocks.
_PLAIN = (
    ("bridge.norm", "vit.layernorm"),
    ("bridge.linear", "decoder.decoder_embed"),
    ("head.norm", "decoder.decoder_norm"),
    ("head.linear", "decoder.decoder_pred"),
)
_STACKS = (("blocks", "vit.encoder.layer"), ("decoder", "decoder.decoder_layers"))
_PATCHES = "vit.embeddings.patch_embeddings.projection"
_TABLES = (
    ("embedding.positions.weight", "vit.embeddings.position_embeddings"),
    ("bridge.positions.weight", "decoder.decoder_pos_embed"),
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
    if kinds != ("layer_norm", "gelu", True, True) or model.norm_bias != "all":
        raise UserError("needs model.normalization layer_norm, activation gelu, add_bias true")
    if model.positions == "none":
        raise UserError("ViTMAE has positions; model.positions is none")
    return paper


def settings_of(config: RunConfig) -> dict[str, Any]:
    """Return `config.json`."""
    paper, model = fits_vit_mae(config), config.model
    count = paper.num_patches(config)
    visible, ratio = context_size(count, paper.mask_ratio), paper.mask_ratio
    if int(count * (1 - ratio)) != visible:
        # transformers rounds the number of visible patches down.
        ratio = 1 - (visible + 0.5) / count
    return {
        "architectures": ["ViTMAEForPreTraining"],
        "model_type": "vit_mae",
        "hidden_size": model.hidden_size,
        "num_hidden_layers": model.num_layers,
        "num_attention_heads": model.num_attention_heads,
        "intermediate_size": model.mlp_size,
        "hidden_act": "gelu",
        "layer_norm_eps": model.norm_epsilon,
        "image_size": config.data.image_size,
        "patch_size": paper.patch_size,
        "num_channels": 3,
        "qkv_bias": True,
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
    heads, layers, width = "num_attention_heads", "num_hidden_layers", "hidden_size"
    count, ratio = (settings["image_size"] // settings["patch_size"]) ** 2, settings["mask_ratio"]
    visible = int(count * (1 - ratio))
    paper = MAEConfig(
        patch_size=settings["patch_size"],
        mask_ratio=ratio if context_size(count, ratio) == visible else 1 - visible / count,
        normalize_targets=settings["norm_pix_loss"],
        decoder=DecoderConfig(
            num_layers=settings[f"decoder_{layers}"],
            hidden_size=settings[f"decoder_{width}"],
            num_attention_heads=settings[f"decoder_{heads}"],
        ),
    )
    model = ModelConfig(
        num_layers=settings[layers],
        hidden_size=settings[width],
        num_attention_heads=settings[heads],
        ffn_hidden_size=settings["intermediate_size"],
        normalization="layer_norm",
        norm_epsilon=settings["layer_norm_eps"],
        activation="gelu",
        add_bias=True,
        positions="learned" if has_tables else "sincos",
    )
    return paper, model


def to_vit_mae(
    whole: Mapping[str, Tensor], settings: Mapping[str, Any], *, position_scale: float = 1.0
) -> dict[str, Tensor]:
    """Convert to transformers' names; sin-cos positions become tables.

    Args:
        whole: unsharded tensors under megavis' names.
        settings: `config.json`.
        position_scale: `model.position_scale` of the run.
    """
    side = settings["patch_size"]
    kernel = whole["embedding.content.weight"].unflatten(1, (side, side, 3)).permute(0, 3, 1, 2)
    tensors = {
        "vit.embeddings.cls_token": whole["embedding.front"].view(1, 1, -1),
        f"{_PATCHES}.weight": kernel,
        f"{_PATCHES}.bias": whole["embedding.content.bias"],
        "decoder.mask_token": whole["bridge.mask"].view(1, 1, -1),
    }
    for (ours, theirs), table in zip(_TABLES, _sines(settings, position_scale), strict=True):
        # The class token has no position.
        tensors[theirs] = F.pad(whole.get(ours, table), (0, 0, 1, 0))[None]
    for kind in ("weight", "bias"):
        for ours, theirs in _PLAIN:
            tensors[f"{theirs}.{kind}"] = whole[f"{ours}.{kind}"]
    for (ours, theirs), (layers, heads) in zip(_STACKS, _depths(settings), strict=True):
        for layer in range(layers):
            block = block_to(whole, f"{ours}.{layer}.", TRANSFORMERS, num_heads=heads)
            tensors |= {f"{theirs}.{layer}.{name}": tensor for name, tensor in block.items()}
    return {name: tensor.float().contiguous() for name, tensor in tensors.items()}


def from_vit_mae(tensors: Mapping[str, Tensor], settings: Mapping[str, Any]) -> dict[str, Tensor]:
    """Invert `to_vit_mae`; tables of sin-cos positions are dropped.

    Raises:
        UserError: a tensor is missing, or the decoder's class token has a position.
    """
    try:
        return _converted(tensors, settings)
    except KeyError as error:
        raise UserError(f"the folder's weights have no {error.args[0]}") from None


def _converted(tensors: Mapping[str, Tensor], settings: Mapping[str, Any]) -> dict[str, Tensor]:
    whole = {
        "embedding.front": tensors["vit.embeddings.cls_token"][0],
        "embedding.content.weight": tensors[f"{_PATCHES}.weight"].permute(0, 2, 3, 1).flatten(1),
        "embedding.content.bias": tensors[f"{_PATCHES}.bias"],
        "bridge.mask": tensors["decoder.mask_token"][0, 0],
    }
    tables = [tensors[theirs][0] for _, theirs in _TABLES]
    whole["embedding.front"] = whole["embedding.front"] + tables[0][0]
    if tables[1][0].any():
        raise UserError(
            "decoder.decoder_pos_embed has a position for the class token, which MAE does not"
        )
    if not has_sines(tensors, settings):
        whole |= {ours: table[1:] for (ours, _), table in zip(_TABLES, tables, strict=True)}
    for kind in ("weight", "bias"):
        for ours, theirs in _PLAIN:
            whole[f"{ours}.{kind}"] = tensors[f"{theirs}.{kind}"]
    for (ours, theirs), (layers, heads) in zip(_STACKS, _depths(settings), strict=True):
        for layer in range(layers):
            block = block_from(tensors, f"{theirs}.{layer}.", TRANSFORMERS, num_heads=heads)
            whole |= {f"{ours}.{layer}.{name}": tensor for name, tensor in block.items()}
    return {name: tensor.float().contiguous() for name, tensor in whole.items()}


def has_sines(tensors: Mapping[str, Tensor], settings: Mapping[str, Any]) -> bool:
    """Return True if both tables contain the sin-cos positions of MAE."""
    return all(
        torch.allclose(tensors[theirs][0, 1:].float(), table, rtol=0, atol=1e-5)
        for (_, theirs), table in zip(_TABLES, _sines(settings), strict=True)
    )


def _sines(settings: Mapping[str, Any], scale: float = 1.0) -> list[Tensor]:
    """Return the positions of encoder and decoder, `[n, h]` and `[n, w]`."""
    side = settings["image_size"] // settings["patch_size"]
    cells = scale * cell_coordinates(torch.arange(side**2), side)
    return [sincos(cells, settings[key]) for key in ("hidden_size", "decoder_hidden_size")]


def _depths(settings: Mapping[str, Any]) -> list[tuple[int, int]]:
    """Return blocks and heads of encoder and decoder."""
    names = ("num_hidden_layers", "num_attention_heads")
    return [
        (settings[names[0]], settings[names[1]]),
        (settings[f"decoder_{names[0]}"], settings[f"decoder_{names[1]}"]),
    ]


def vit_mae_predictions(
    tensors: Mapping[str, Tensor], settings: Mapping[str, Any], pixels: Tensor, order: Tensor
) -> Tensor:
    """Run the folder's model, independently of megavis' layers, to check a conversion.

    Args:
        tensors: tensors under transformers' names.
        settings: `config.json`.
        pixels: standardised images, float32 `[b, H, W, 3]`.
        order: int64 `[b, n]`, indices of the patches, visible ones first.

    Returns:
        Predicted hidden patches in this order, float32 `[b, n - c, d]`.
    """

    def pair(name: str) -> tuple[Tensor, Tensor]:
        return tensors[f"{name}.weight"], tensors[f"{name}.bias"]

    def norm(x: Tensor, name: str) -> Tensor:
        return F.layer_norm(x, x.shape[-1:], *pair(name), settings["layer_norm_eps"])

    def blocks(x: Tensor, stack: int) -> Tensor:
        layers, heads = _depths(settings)[stack]
        for layer in range(layers):
            prefix, epsilon = f"{_STACKS[stack][1]}.{layer}.", settings["layer_norm_eps"]
            x = run_block(x, tensors, prefix, TRANSFORMERS, num_heads=heads, epsilon=epsilon)
        return x

    count, index = order.shape[1], order[..., None]
    visible = int(count * (1 - settings["mask_ratio"]))
    kernel, bias = pair(_PATCHES)
    patches = patchify(pixels, settings["patch_size"])
    below, above = (tensors[theirs] for _, theirs in _TABLES)
    hidden = F.linear(patches, kernel.permute(0, 2, 3, 1).flatten(1), bias) + below[:, 1:]
    front = (tensors["vit.embeddings.cls_token"] + below[:, :1]).expand(len(pixels), -1, -1)
    seen = hidden.take_along_dim(index[:, :visible], 1)
    encoded = norm(blocks(torch.cat([front, seen], 1), 0), "vit.layernorm")
    lifted = F.linear(encoded, *pair("decoder.decoder_embed"))
    masks = tensors["decoder.mask_token"].expand(len(pixels), count - visible, -1)
    everything = torch.cat([lifted[:, 1:], masks], 1)
    everything = everything + above[:, 1:].expand(len(pixels), -1, -1).take_along_dim(index, 1)
    decoded = blocks(torch.cat([lifted[:, :1] + above[:, :1], everything], 1), 1)
    predicted = F.linear(norm(decoded, "decoder.decoder_norm"), *pair("decoder.decoder_pred"))
    return predicted[:, 1 + visible :]


def read_vit_mae(args: argparse.Namespace) -> ReleasedRun:
    """Convert a folder; predictions are compared.

    Raises:
        UserError: it is not such a folder.
    """
    settings, tensors = read_hub_folder(args.source)
    kind = settings.get("model_type", "vit_mae")
    if kind != "vit_mae":
        raise UserError(f"{args.source}: this is a folder of {kind!r}, not of 'vit_mae'")
    tensors = with_older_names(tensors)
    _check_folder(args.source, settings, tensors)
    paper, model = vit_mae_sections(settings, has_tables=not has_sines(tensors, settings))
    return ReleasedRun(
        paper,
        from_vit_mae(tensors, settings),
        image_size=settings["image_size"],
        sections={"model": model},
        compare=lambda run: [compared_vit_mae(run, tensors, settings)],
        compared="predictions",
    )


def _check_folder(folder: Path, settings: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
    """Raise UserError if a folder's settings are not MAE's, or do not fit its weights."""
    path, name = folder / "config.json", "decoder_intermediate_size"
    own = ("num_hidden_layers", "hidden_size", "num_attention_heads", "intermediate_size")
    check_vit_settings(path, settings, sizes=[f"decoder_{key}" for key in own])
    width = settings["decoder_hidden_size"]
    if width % settings["decoder_num_attention_heads"]:
        raise UserError(f"{path}: decoder_hidden_size is not divisible by its attention heads")
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
    count = (settings["image_size"] // settings["patch_size"]) ** 2
    shapes = {
        **vit_shapes(settings, "vit."),
        "decoder.decoder_embed.weight": (width, settings["hidden_size"]),
        "decoder.decoder_pos_embed": (1, 1 + count, width),
    }
    wanted = "ViTMAEForPreTraining"
    check_shapes(folder, tensors, shapes, wanted=wanted, settings=settings)
    for (_, stack), (layers, _) in zip(_STACKS, _depths(settings), strict=True):
        check_depth(folder, tensors, stack, layers)
    for found, ours in zip(read_statistics(folder), (CHANNEL_MEAN, CHANNEL_DEVIATION), strict=True):
        if any(abs(a - b) > 1e-6 for a, b in zip(found, ours, strict=True)):
            raise UserError(
                f"{folder / 'preprocessor_config.json'}: pixels are standardised by"
                f" {[round(value, 4) for value in found]}; MAE of megavis has ImageNet's"
                f" {list(ours)}, and its targets would differ"
            )


def compared_vit_mae(
    run: OpenedRun, tensors: Mapping[str, Tensor], settings: Mapping[str, Any]
) -> tuple[Tensor, Tensor]:
    """Return the predictions of a run and of a ViTMAE folder on random images."""
    images, index = random_images(run.config.data.image_size), torch.arange(2)
    order = model_of(run.objective).schedule.draw(index).order
    theirs = vit_mae_predictions(tensors, settings, standardize(images), order)
    return run.outputs(images, sample_index=index), theirs
