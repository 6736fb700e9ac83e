"""Convert released VQGANs, of "Taming Transformers", MAGE, RAR and LlamaGen."""

from __future__ import annotations

import argparse
import re
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor

from megavis.config.errors import UserError
from megavis.config.load import load_config
from megavis.grammar.class_ids import ClassIdsConfig
from megavis.papers.vqgan.config import VQGANConfig
from megavis.tokenizers.network_tokenizer import read_weights_file
from megavis.tokenizers.shapes import VQGANShape
from megavis.tokenizers.vqgan import VQGANNetwork
from megavis.weights.released import Released, ReleasedTensors
from megavis.weights.tables import Row, count

_Paper = TypeVar("_Paper", bound=ClassIdsConfig)


def with_tokenizer(paper: _Paper, run: Path | None) -> _Paper:
    """Return the config of a model of ids with the VQGAN of `--tokenizer`, if one is given.

    Raises:
        UserError: the run is of something else.
    """
    if run is None:
        return paper
    config = load_config(run / "config.yaml").config.objective
    if not isinstance(config, VQGANConfig):
        raise UserError(f"--tokenizer: {run} is a run of {config.name}, not of a VQGAN")
    update = {"tokenizer": str(run), "patch_size": config.shape.downsampling}
    return paper.model_copy(update=update)


def read_vqgan(args: argparse.Namespace) -> Released:
    """Read a VQGAN, without its discriminator, which differs here.

    The file is `.safetensors`, or a `.ckpt`, `.pt` or `.bin` file of plain tensors, released with

    - "Taming Transformers": encoder, decoder, codebook and discriminator (`loss.…`);
    - "MAGE: MAsked Generative Encoder to Unify Representation Learning and Image Synthesis":
      MaskGIT's layers under the same names;
    - "Randomized Autoregressive Visual Generation" (`maskgit-vqgan-imagenet-f16-256.bin`):
      MaskGIT's layers under similar names;
    - "Autoregressive Model Beats Diffusion: Llama for Scalable Image Generation"
      (`vq_ds16_c2i.pt`): the layers of "Taming Transformers" under other names. If a checkpoint
      also has averaged weights (`ema`), those are read.

    Raises:
        UserError: the file is missing, contains more than tensors, or no VQGAN.
    """
    path = args.source
    stored = read_weights_file(path, inside=("state_dict", "ema", "model"))
    kept = {n: t.float().contiguous() for n, t in stored.items() if n.startswith(_PARTS)}
    if "quantize.embedding.weight" not in kept:
        raise UserError(f"{path} has no quantize.embedding.weight: it is not a released VQGAN")
    is_llamagen = any(name.startswith("decoder.conv_blocks.") for name in kept)
    if is_llamagen:
        kept.pop("quantize.codebook_used", None)  # the ids of its last training images
        coarsest = count(kept, "decoder.conv_blocks.") - 1
        kept = {_llamagen_name(name, coarsest): tensor for name, tensor in kept.items()}
    # MaskGIT's layers: no attention, and no convolutions around the codebook.
    elif "quant_conv.weight" not in kept and "encoder.mid.attn_1.norm.weight" not in kept:
        coarsest = count(kept, "decoder.up.") - 1
        kept = {_maskgit_name(name, coarsest): tensor for name, tensor in kept.items()}
    tensors = ReleasedTensors(kept, source=path, model="a VQGAN")
    # LlamaGen's files do not record whether codes are normalized; all released ones are.
    shape = replace(vqgan_shape(tensors), normalize_codes=is_llamagen)
    with torch.device("meta"):
        names = VQGANNetwork(shape).state_dict()
    paper = VQGANConfig(**asdict(shape), perceptual_weight=0.0, adversarial_weight=0.0)
    table = [Row(f"vqgan.network.{name}", name) for name in names]
    return Released(paper, tensors, table, image_size=args.image_size)


_PARTS = ("encoder.", "decoder.", "quantize.", "quant_conv.", "post_quant_conv.")
_MIDDLE = ("block_1", "attn_1", "block_2")


def _llamagen_name(name: str, coarsest: int) -> str:
    """Map a tensor's name in LlamaGen's files to megavis'; its decoder's first level is coarsest.

    Args:
        name: such as `decoder.conv_blocks.0.res.1.conv1.weight`.
        coarsest: number of the coarsest level.
    """
    name = re.sub(r"encoder\.conv_blocks\.", "encoder.down.", name)
    name = re.sub(
        r"decoder\.conv_blocks\.(\d+)", lambda found: f"decoder.up.{coarsest - int(found[1])}", name
    )
    name = re.sub(r"mid\.([0-2])\.", lambda found: f"mid.{_MIDDLE[int(found[1])]}.", name)
    return name.replace(".res.", ".block.")


_MASKGIT_PARTS = {
    "norm1": "norm_0",
    "conv1": "conv_0",
    "norm2": "norm_1",
    "conv2": "conv_1",
    "nin_shortcut": "shortcut",
    "norm_out": "norm",
}


def _maskgit_name(name: str, coarsest: int) -> str:
    """Map a tensor's name in MAGE's or RAR's file to megavis'; `coarsest` numbers its level.

    Both number the decoder's levels from the finest one; RAR's the blocks in the middle from 0.
    """
    name = re.sub(r"down\.(\d+)\.block", r"levels.\1", name)
    name = re.sub(r"up\.(\d+)\.block", lambda found: f"levels.{coarsest - int(found[1])}", name)
    name = re.sub(
        r"up\.(\d+)\.upsample[._]conv", lambda found: f"enlargers.{coarsest - int(found[1])}", name
    )
    name = re.sub(r"mid\.block_(\d)", lambda found: f"middle.{int(found[1]) - 1}", name)
    name = re.sub(r"mid\.(\d)", r"middle.\1", name)
    return ".".join(_MASKGIT_PARTS.get(part, part) for part in name.split("."))


def vqgan_shape(tensors: Mapping[str, Tensor]) -> VQGANShape:
    """Infer the sizes of a network from its tensors; a missing one raises as they do."""
    entries, code = tensors["quantize.embedding.weight"].shape
    filters = tensors["encoder.conv_in.weight"].shape[0]
    is_maskgit = "encoder.levels.0.0.conv_0.weight" in tensors
    levels = "encoder.levels." if is_maskgit else "encoder.down."
    block, convolution = ("", "conv_0") if is_maskgit else ("block.", "conv1")
    widths = [
        tensors[f"{levels}{i}.{block}0.{convolution}.weight"].shape[0]
        for i in range(count(tensors, levels))
    ]
    return VQGANShape(
        codebook_size=entries,
        code_size=code,
        filters=filters,
        multipliers=tuple(width // filters for width in widths),
        blocks_per_level=count(tensors, f"{levels}0.{block}"),
        latent_channels=code if is_maskgit else tensors["quant_conv.weight"].shape[1],
        layers="maskgit" if is_maskgit else "taming",
    )
