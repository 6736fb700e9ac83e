"""Released weights of MAR: "Autoregressive Image Generation without Vector Quantization".

A checkpoint of the released code (`checkpoint-last.pth`), from which the averaged weights are read,
or a file with the same tensors. Sizes are inferred from the tensors.
"""

from __future__ import annotations

import argparse
import math
from typing import Any

import torch

from megavis.config.errors import UserError
from megavis.config.schema import ModelConfig
from megavis.grammar.words import DecoderConfig
from megavis.papers.mar.config import MARConfig
from megavis.weights.released import Released, ReleasedTensors
from megavis.weights.tables import BATCHED, TOKEN, Layout, Row, Table, count, layer
from megavis.weights.vaes import with_vae
from megavis.weights.vits import TIMM

_MLP = "diffloss.net."
_SCALE = 0.2325
"""Factor of the latents in the released code, for its KL-16."""
_HEADS = {1280: 16}
"""Attention heads of the released widths, where they are not width / 64."""
_HEAD_SIZE = 64
# The class embeddings, then the one that stands for no class.
_CLASSES = Layout(
    lambda classes, dummy: torch.cat([classes, dummy]), lambda rows: (rows[:-1], rows[-1:])
)


def mar_table(
    *,
    class_rows: int,
    num_layers: int,
    num_heads: int,
    decoder_layers: int,
    decoder_heads: int,
    denoiser_layers: int,
) -> Table:
    """Map the tensors of a run to the released names; `class_rows` hold the class."""
    # One table of positions, class rows first.
    places = Layout(
        lambda table: (table[0, :class_rows], table[0, class_rows:]),
        lambda front, rest: torch.cat([front, rest])[None],
    )
    table = [
        Row("embedding.front.weight", ("class_emb.weight", "fake_latent"), _CLASSES),
        Row(_places("embedding"), "encoder_pos_embed_learned", places),
        *layer("embedding.content", "z_proj"),
        *layer("embedding.row_norm", "z_proj_ln"),
        *layer("bridge.norm", "encoder_norm"),
        *layer("bridge.linear", "decoder_embed"),
        Row("bridge.mask", "mask_token", TOKEN),
        Row(_places("bridge"), "decoder_pos_embed_learned", places),
        *layer("head.norm", "decoder_norm"),
        Row("head.positions.weight", "diffusion_pos_embed_learned", BATCHED),
        *_denoiser(denoiser_layers),
    ]
    for number in range(num_layers):
        table += TIMM.block(f"blocks.{number}", f"encoder_blocks.{number}", num_heads)
    for number in range(decoder_layers):
        table += TIMM.block(f"decoder.{number}", f"decoder_blocks.{number}", decoder_heads)
    return table


def _places(ours: str) -> tuple[str, str]:
    return f"{ours}.front_position", f"{ours}.positions.weight"


def _denoiser(num_layers: int) -> list[Row]:
    """Return the rows of the MLP that denoises tokens."""
    table = [
        *layer("head.entry", f"{_MLP}cond_embed"),
        *layer("head.noisy", f"{_MLP}input_proj"),
        *layer("head.decoder.level.inner", f"{_MLP}time_embed.mlp.0"),
        *layer("head.decoder.level.outer", f"{_MLP}time_embed.mlp.2"),
        *layer("head.decoder.modulation", f"{_MLP}final_layer.adaLN_modulation.1"),
        *layer("head.decoder.linear", f"{_MLP}final_layer.linear"),
    ]
    for number in range(num_layers):
        ours, theirs = f"head.decoder.layers.{number}", f"{_MLP}res_blocks.{number}"
        table += layer(f"{ours}.norm", f"{theirs}.in_ln")
        table += layer(f"{ours}.inner", f"{theirs}.mlp.0")
        table += layer(f"{ours}.outer", f"{theirs}.mlp.2")
        table += layer(f"{ours}.modulation", f"{theirs}.adaLN_modulation.1")
    return table


def read_mar(args: argparse.Namespace) -> Released:
    """Read a checkpoint.

    `--tokenizer` names the run of the VAE, which gives the pixels of a latent, by default 16.

    Raises:
        UserError: the file is not such a checkpoint.
    """
    tensors = ReleasedTensors.of_file(args.source, model="MAR", inside=("model_ema", "model"))
    width, decoder_width = len(tensors["z_proj.bias"]), len(tensors["decoder_embed.bias"])
    heads = _heads(width, args.heads, "--heads")
    decoder_heads = _heads(decoder_width, args.decoder_heads, "--decoder-heads")
    sizes: dict[str, Any] = {
        "class_rows": _class_rows(tensors),
        "denoiser_layers": count(tensors, f"{_MLP}res_blocks."),
    }
    layers, decoder_layers = (count(tensors, f"{part}_blocks.") for part in ("encoder", "decoder"))
    side = math.isqrt(tensors["diffusion_pos_embed_learned"].shape[1])
    paper = MARConfig(
        **sizes,
        latent_channels=tensors["z_proj.weight"].shape[1],
        latent_scale=_SCALE,
        num_classes=len(tensors["class_emb.weight"]),
        denoiser_width=len(tensors[f"{_MLP}cond_embed.bias"]),
        decoder=DecoderConfig(
            num_layers=decoder_layers,
            hidden_size=decoder_width,
            num_attention_heads=decoder_heads,
        ),
    )
    paper = with_vae(paper, args.tokenizer)
    return Released(
        paper,
        tensors,
        mar_table(
            **sizes,
            num_layers=layers,
            num_heads=heads,
            decoder_layers=decoder_layers,
            decoder_heads=decoder_heads,
        ),
        image_size=side * paper.downsampling,
        sections={"model": _model(layers, width, heads)},
    )


def _heads(width: int, chosen: int | None, option: str) -> int:
    """Return the attention heads of a stack of this width, which they must divide."""
    heads = chosen or _HEADS.get(width) or max(1, width // _HEAD_SIZE)
    if width % heads:
        raise UserError(f"a width of {width} is not divisible by {heads} heads; pass {option}")
    return heads


def _class_rows(tensors: ReleasedTensors) -> int:
    """Return how many rows before the latents hold the class; raise UserError if these tile none.

    Only the number of rows with a position is stored.
    """
    rows = tensors["encoder_pos_embed_learned"].shape[1]
    latents = tensors["diffusion_pos_embed_learned"].shape[1]
    if math.isqrt(latents) ** 2 != latents or rows < latents + 2:
        raise UserError(
            f"{tensors.source}: diffusion_pos_embed_learned has {latents} and"
            f" encoder_pos_embed_learned {rows} positions; MAR has a square of latents, and at"
            " least two more for the class"
        )
    return rows - latents


def _model(num_layers: int, width: int, num_heads: int) -> ModelConfig:
    """Return the section `model` of the encoder, with the dropout of further training."""
    return ModelConfig(
        num_layers=num_layers,
        hidden_size=width,
        num_attention_heads=num_heads,
        normalization="layer_norm",
        norm_epsilon=1e-6,
        activation="gelu",
        add_bias=True,
        hidden_dropout=0.1,
        attention_dropout=0.1,
        mlp_dropout=0.1,
    )
