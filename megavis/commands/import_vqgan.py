"""`megavis import vqgan`: a run out of a released VQGAN."""

from __future__ import annotations

import argparse

from megavis.commands.import_givt import write_released


def import_vqgan(args: argparse.Namespace) -> None:
    """Write the run of a VQGAN; without its discriminator, which is another network here.

    Raises:
        UserError: the file is no such checkpoint.
    """
    from dataclasses import asdict

    from megavis.papers.vqgan.config import VQGANConfig
    from megavis.tokenizers.vqgan_released import read_released, released_shape

    tensors = read_released(args.source)
    shape = released_shape(tensors)
    paper = VQGANConfig(**asdict(shape), perceptual_weight=0.0, adversarial_weight=0.0)
    weights = {f"vqgan.network.{name}": tensor for name, tensor in tensors.items()}
    write_released(args, paper, weights, image_size=args.image_size)
