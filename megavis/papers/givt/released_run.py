"""The runs of GIVT's released Transformers and VAEs."""

from __future__ import annotations

import argparse
from pathlib import Path

from megavis.composition.released_run import ReleasedRun
from megavis.config.errors import UserError
from megavis.config.load import load_config
from megavis.papers.givt.released import read_arrays, vae_shape, vae_weights
from megavis.papers.givt.weights import ReleasedModel
from megavis.papers.vae.config import LabelMapVAEConfig, VAEConfig


def read_transformer(args: argparse.Namespace) -> ReleasedRun:
    """Convert a causal or masked model, with its adapter if the file has one.

    Raises:
        UserError: the file is not such a checkpoint, or lacks the requested part.
    """
    arrays = dict(read_arrays(args.source))
    if args.adapter is not None:
        adapter = read_arrays(args.adapter)
        arrays |= {f"params_adaptor/{name}": array for name, array in adapter.items()}
    released = ReleasedModel(arrays, mode=args.mode, num_classes=args.num_classes)
    paper = released.objective()
    if args.tokenizer is not None:
        pixels = _pixels_of_a_latent(args.tokenizer)
        update = {"tokenizer": str(args.tokenizer), "downsampling": pixels}
        paper = paper.model_copy(update=update)
    size = released.side * paper.downsampling
    if released.image_size not in (None, size):
        raise UserError(
            f"the encoder reads images of {released.image_size}² pixels, and the VAE of --tokenizer"
            f" gives {released.side}² latents of images of {size}²"
        )
    return ReleasedRun(
        paper, released.weights(), image_size=size, sections={"model": released.model()}
    )


def _pixels_of_a_latent(run_folder: Path) -> int:
    path = run_folder / "config.yaml"
    paper = load_config(path).config.objective
    if isinstance(paper, LabelMapVAEConfig):
        return paper.downsampling
    if not isinstance(paper, VAEConfig):
        raise UserError(f"--tokenizer: {run_folder} is a run of {paper.name}, not of a VAE")
    return paper.shape.downsampling


def read_vae(args: argparse.Namespace) -> ReleasedRun:
    """Convert a VAE, without its discriminator, which was not released.

    Raises:
        UserError: the file is not such a checkpoint.
    """
    arrays = read_arrays(args.source)
    shape = vae_shape(arrays)
    paper = VAEConfig(
        latent_channels=shape.latent_channels,
        filters=shape.filters,
        multipliers=shape.multipliers,
        blocks_per_level=shape.blocks_per_level,
        perceptual_weight=0.0,
        adversarial_weight=0.0,
        **({} if args.beta is None else {"beta": args.beta}),
    )
    weights = {f"vae.network.{name}": tensor for name, tensor in vae_weights(arrays).items()}
    return ReleasedRun(paper, weights, image_size=args.image_size)
