"""Released VAEs of latent diffusion: LDM's, and MAR's KL-16.

"High-Resolution Image Synthesis with Latent Diffusion Models", `AutoencoderKL`. LDM's checkpoints
keep the tensors under `state_dict`, MAR's (`kl16.ckpt`) under `model`. Sizes, and which levels have
attention, are inferred from the tensors.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Mapping

import torch
from torch import Tensor

from megavis.papers.vae.config import VAEConfig
from megavis.tokenizers.network_tokenizer import read_weights_file
from megavis.tokenizers.shapes import VAEShape
from megavis.tokenizers.vae import VAENetwork
from megavis.weights.released import Released, ReleasedTensors
from megavis.weights.tables import Row, count

_PARTS = ("encoder.", "decoder.", "quant_conv.", "post_quant_conv.")


def read_ldm_vae(args: argparse.Namespace) -> Released:
    """Read a VAE; its discriminator, which differs from ours, is dropped.

    Raises:
        UserError: the file is not such a checkpoint.
    """
    stored = read_weights_file(args.source, inside=("state_dict", "model"))
    kept = {name: each.float() for name, each in stored.items() if name.startswith(_PARTS)}
    tensors = ReleasedTensors(kept, source=args.source, model="a VAE of latent diffusion")
    shape = ldm_vae_shape(tensors)
    with torch.device("meta"):
        names = VAENetwork(shape).state_dict()
    paper = VAEConfig(
        latent_channels=shape.latent_channels,
        filters=shape.filters,
        multipliers=shape.multipliers,
        blocks_per_level=shape.blocks_per_level,
        layers="taming",
        attention_levels=shape.attention_levels,
        perceptual_weight=0.0,
        adversarial_weight=0.0,
    )
    table = [Row(f"vae.network.{name}", name) for name in names]
    return Released(paper, tensors, table, image_size=args.image_size)


def ldm_vae_shape(tensors: Mapping[str, Tensor]) -> VAEShape:
    """Infer the sizes of a network from its tensors, which raise if one is missing."""
    filters = len(tensors["encoder.conv_in.weight"])
    levels = count(tensors, "encoder.down.")
    firsts = (f"encoder.down.{level}.block.0.conv1.weight" for level in range(levels))
    encoder, decoder = (
        len({found[1] for name in tensors if (found := re.match(rf"{part}\.(\d+)\.attn\.", name))})
        for part in (r"encoder\.down", r"decoder\.up")
    )
    return VAEShape(
        latent_channels=tensors["post_quant_conv.weight"].shape[1],
        filters=filters,
        multipliers=tuple(len(tensors[first]) // filters for first in firsts),
        blocks_per_level=count(tensors, "encoder.down.0.block."),
        layers="taming",
        attention_levels=(encoder, decoder),
    )
