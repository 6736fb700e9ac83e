"""GIVT's released VAEs, of images and of label maps: their config and names.

Those of images are convolutional networks (appendix C.2). Those of label maps are Transformers
(section 4.2), with blocks that are named `encoder/encoderblock_3/...`, or stacked on axis 0 of
`encoder/encoderblock/...`; likewise those of `decoder/`.

Legend: C one-hot channels of a pixel, h hidden size, p side of a patch in pixels.
"""

from __future__ import annotations

import argparse
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from megavis.config.errors import UserError
from megavis.config.load import load_config
from megavis.config.schema import ModelConfig, ObjectiveConfig
from megavis.papers.vae.config import LabelMapVAEConfig, VAEConfig
from megavis.tokenizers.shapes import VAEShape
from megavis.tokenizers.vae import VAENetwork
from megavis.weights.flax_layers import dense, encoder_blocks, network_rows, norm, unstacked
from megavis.weights.released import Released, ReleasedTensors, read_arrays
from megavis.weights.tables import BATCHED, Layout, Row, Table, count

_ENCODER, _DECODER = "encoder/encoderblock_", "decoder/encoderblock_"
_Paper = TypeVar("_Paper", bound=ObjectiveConfig)


def with_vae(paper: _Paper, run: Path | None) -> _Paper:
    """Return the config of a model of latents with the VAE of `--tokenizer`, if one is given.

    Raises:
        UserError: the run is of something else.
    """
    if run is None:
        return paper
    vae = load_config(run / "config.yaml").config.objective
    if not isinstance(vae, VAEConfig | LabelMapVAEConfig):
        raise UserError(f"--tokenizer: {run} is a run of {vae.name}, not of a VAE")
    pixels = vae.shape.downsampling if isinstance(vae, VAEConfig) else vae.downsampling
    return paper.model_copy(update={"tokenizer": str(run), "downsampling": pixels})


def read_vae(args: argparse.Namespace) -> Released:
    """Read a VAE, without its discriminator, which was not released.

    Raises:
        UserError: the file is not such a checkpoint.
    """
    tensors = ReleasedTensors(
        vae_arrays(read_arrays(args.source)), source=args.source, model="a released VAE"
    )
    shape = vae_shape(tensors)
    paper = VAEConfig(
        latent_channels=shape.latent_channels,
        filters=shape.filters,
        multipliers=shape.multipliers,
        blocks_per_level=shape.blocks_per_level,
        perceptual_weight=0.0,
        adversarial_weight=0.0,
        **({} if args.beta is None else {"beta": args.beta}),
    )
    return Released(paper, tensors, vae_table(shape, "vae.network."), image_size=args.image_size)


def vae_arrays(arrays: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return a VAE's arrays under `cnn_encoder/` and `cnn_decoder/`, if possible averages."""
    for prefix in ("ema_params/", "g_params/"):
        found = {f"cnn_{n.removeprefix(prefix)}": a for n, a in arrays.items() if prefix in n}
        if found:
            return found
    return arrays


def vae_shape(tensors: Mapping[str, Tensor]) -> VAEShape:
    """Infer the sizes of a VAE from its arrays; a missing one raises KeyError or UserError."""
    filters = tensors["cnn_encoder/Conv_0/kernel"].shape[-1]
    latent_channels = tensors["cnn_decoder/Conv_0/kernel"].shape[-2]
    # The decoder has `conv_in`, one convolution per doubling of the resolution, and `conv_out`.
    num_levels = sum(bool(re.fullmatch(r"cnn_decoder/Conv_\d+/kernel", n)) for n in tensors) - 1
    # The middle has the same number of blocks as a level.
    per_level = count(tensors, "cnn_encoder/ResBlock_") // (num_levels + 1)
    firsts = (f"cnn_encoder/ResBlock_{level * per_level}" for level in range(num_levels))
    widths = [tensors[f"{first}/Conv_1/kernel"].shape[-1] for first in firsts]
    return VAEShape(
        latent_channels=latent_channels,
        filters=filters,
        multipliers=tuple(width // filters for width in widths),
        blocks_per_level=per_level,
    )


def vae_table(shape: VAEShape, ours: str = "") -> Table:
    """Return the names of a `VAENetwork`, with the prefix `ours`, and the released ones."""
    with torch.device("meta"):
        network = VAENetwork(shape)
    names = _vae_layers(shape)
    return network_rows(network, names.__getitem__, ours)


def _vae_layers(shape: VAEShape) -> dict[str, str]:
    """Return the released name of every layer that may have parameters, by ours."""
    per_level, levels = shape.blocks_per_level, len(shape.multipliers)
    level_blocks = [f"levels.{level}.{i}" for level in range(levels) for i in range(per_level)]
    middle_blocks = [f"middle.{i}" for i in range(per_level)]
    enlargers = [f"enlargers.{i}" for i in range(levels - 1)]
    names = {}
    for part, blocks, convolutions in (
        ("encoder", level_blocks + middle_blocks, ["conv_in", "conv_out"]),
        ("decoder", middle_blocks + level_blocks, ["conv_in", *enlargers, "conv_out"]),
    ):
        names[f"{part}.norm"] = f"cnn_{part}/GroupNorm_0"
        names |= {f"{part}.{name}": f"cnn_{part}/Conv_{i}" for i, name in enumerate(convolutions)}
        for number, name in enumerate(blocks):
            ours, theirs = f"{part}.{name}", f"cnn_{part}/ResBlock_{number}"
            for i in (0, 1):
                names[f"{ours}.norm_{i}"] = f"{theirs}/GroupNorm_{i}"
                names[f"{ours}.conv_{i}"] = f"{theirs}/Conv_{i}"
            names[f"{ours}.shortcut"] = f"{theirs}/Conv_2"
    return names


def read_label_map_vae(args: argparse.Namespace) -> Released:
    """Read a VAE of panoptic maps or depths.

    Raises:
        UserError: the file is not such a checkpoint, or is not of the requested kind.
    """
    arrays = unstacked(unstacked(read_arrays(args.source), _ENCODER), _DECODER)
    tensors = ReleasedTensors(arrays, source=args.source, model="a released VAE of label maps")
    side, _, channels, _ = tensors["embedding/kernel"].shape
    image_size = math.isqrt(tensors["pos_embedding_encoder"].shape[1]) * side
    latents = math.isqrt(args.latents)
    if latents**2 != args.latents or image_size % latents:
        raise UserError(
            f"--latents: {args.latents} latents do not tile a square of {image_size} pixels"
        )
    keys = {} if args.beta is None else {"beta": args.beta}
    paper = LabelMapVAEConfig(
        **{**_channels(args, channels), **keys},
        patch_size=side,
        downsampling=image_size // latents,
        latent_channels=len(tensors["decoder_stem/kernel"]),
        decoder_layers=count(tensors, _DECODER),
    )
    width, heads, _ = tensors[f"{_ENCODER}0/MultiHeadDotProductAttention_0/query/kernel"].shape
    model = ModelConfig(
        num_layers=count(tensors, _ENCODER),
        hidden_size=width,
        num_attention_heads=heads,
        ffn_hidden_size=tensors[f"{_ENCODER}0/MlpBlock_0/Dense_0/kernel"].shape[1],
        normalization="layer_norm",
        norm_epsilon=1e-6,
        activation="gelu_tanh",
        add_bias=True,
    )
    return Released(
        paper, tensors, _label_map_table(tensors), image_size, sections={"model": model}
    )


def _channels(args: argparse.Namespace, channels: int) -> dict[str, Any]:
    """Return the keys of the target's C channels; raises UserError if it cannot have these."""
    if args.target == "depth":
        return {"target": "depth", "depth_bins": channels, "beta": 2e-4}
    rest = channels - args.semantic_channels
    if rest < 2:
        raise UserError(
            f"--semantic-channels: the file has {channels} channels for classes and segments, not"
            f" over {args.semantic_channels}; is it a VAE of depths (--target depth)?"
        )
    return {"semantic_channels": args.semantic_channels, "instance_channels": rest}


def _label_map_table(tensors: ReleasedTensors) -> Table:
    """Map our tensors to the arrays' names."""
    side, _, channels, _ = tensors["embedding/kernel"].shape
    kernel = Layout(lambda x: x.flatten(0, 2), lambda x: x.unflatten(0, (side, side, channels)))
    return [
        Row("embedding.table", "embedding/kernel", kernel),
        Row("embedding.bias", "embedding/bias"),
        Row("embedding.positions.weight", "pos_embedding_encoder", BATCHED),
        *encoder_blocks("blocks.", _ENCODER, tensors),
        *norm("bottleneck.norm", "encoder/encoder_norm"),
        *dense("bottleneck.moments", "encoder_head"),
        *dense("bottleneck.linear", "decoder_stem"),
        Row("bottleneck.positions.weight", "pos_embedding_decoder", BATCHED),
        *encoder_blocks("decoder.", _DECODER, tensors),
        *norm("head.norm", "decoder/encoder_norm"),
        *dense("head.linear", "decoder_head"),
    ]
