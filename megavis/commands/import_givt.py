"""`megavis import givt` and `givt-vae`: runs out of the released `.npz` files."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megavis.config.errors import UserError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from megavis.config.schema import ObjectiveConfig


def import_transformer(args: argparse.Namespace) -> None:
    """Write the run of a causal or masked model, with its adapter where the file has one.

    Raises:
        UserError: the file is no such checkpoint, or does not hold what is asked for.
    """
    from megavis.papers.givt.released import read_arrays
    from megavis.papers.givt.weights import ReleasedModel

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
    write_released(args, paper, released.weights(), image_size=size, model=released.model())


def _pixels_of_a_latent(run_folder: Path) -> int:
    from megavis.config.load import load_config
    from megavis.papers.vae.config import VAEConfig

    path = run_folder / "config.yaml"
    paper = load_config(path).config.objective
    if not isinstance(paper, VAEConfig):
        raise UserError(f"--tokenizer: {run_folder} is a run of {paper.name}, not of a vae")
    return paper.shape.downsampling


def import_vae(args: argparse.Namespace) -> None:
    """Write the run of a VAE; without its discriminator, which was not released.

    Raises:
        UserError: the file is no such checkpoint.
    """
    from megavis.papers.givt.released import read_arrays, vae_shape, vae_weights
    from megavis.papers.vae.config import VAEConfig

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
    write_released(args, paper, weights, image_size=args.image_size)


def write_released(
    args: argparse.Namespace,
    paper: ObjectiveConfig,
    weights: Mapping[str, Tensor],
    *,
    image_size: int,
    **sections: Any,
) -> None:
    """Write the run folder and say how many parameters it has; `sections` of the config."""
    from megavis.commands.imported_run import imported_config, write_run

    config = imported_config(args.run_folder, paper, image_size=image_size, **sections)
    write_run(args.run_folder, config, weights)
    total = sum(tensor.numel() for tensor in weights.values())
    sys.stdout.write(f"{args.run_folder}: {total:,} parameters from {args.source}\n")
