"""The run of a released VQGAN."""

from __future__ import annotations

import argparse
from dataclasses import asdict

from megavis.composition.released_run import ReleasedRun
from megavis.papers.vqgan.config import VQGANConfig
from megavis.tokenizers.vqgan_released import read_released, released_shape


def read_vqgan(args: argparse.Namespace) -> ReleasedRun:
    """Convert a VQGAN, without its discriminator, which differs here.

    Raises:
        UserError: the file is not such a checkpoint.
    """
    tensors = read_released(args.source)
    shape = released_shape(tensors)
    paper = VQGANConfig(**asdict(shape), perceptual_weight=0.0, adversarial_weight=0.0)
    weights = {f"vqgan.network.{name}": tensor for name, tensor in tensors.items()}
    return ReleasedRun(paper, weights, image_size=args.image_size)
