"""Training of the VAE whose latents GIVT models."""

from __future__ import annotations

import argparse

from megavis.config.arguments import positive
from megavis.config.papers import IMAGE_SIZE, FigureSpec, ImportSpec


def _add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--draws", type=positive, default=3, help="samples per image")


FIGURES = (
    FigureSpec(
        "posterior",
        help="images decoded from samples of the posterior (GIVT, Figure 12)",
        description="Encode held-out images, sample their latents and decode them. Prints the PSNR"
        " of the decoded means and samples. The figure shows the first eight images: original,"
        " decoded mean, one column per sample.",
        num_images=64,
        plot="megavis.papers.vae.posterior_figure:plot_posterior",
        example="runs/givt_vae --draws 5",
        add_options=_add_options,
    ),
)

IMPORTS = (
    ImportSpec(
        "ldm-vae",
        help="a checkpoint of one of the KL-regularized autoencoders of latent diffusion (kl-f4,"
        " kl-f8, kl-f16, kl-f32), or kl16.ckpt of MAR",
        read="megavis.weights.ldm_vae:read_ldm_vae",
        options=(IMAGE_SIZE,),
    ),
)
