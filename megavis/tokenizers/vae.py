"""GIVT's VAE as a tokenizer: images to mean and scale of their latents, and latents to images."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor

from megavis.parallel.device import full_float32
from megavis.tokenizers.base import LatentTokenizer
from megavis.tokenizers.grids import grid_side, shape_of, to_images, to_pixels
from megavis.tokenizers.shapes import VAEShape
from megavis.tokenizers.vae_network import VAENetwork

_CONFIG_KEYS = {"groups": "norm_groups"}  # where the config has a longer name


class VAE(LatentTokenizer):
    """A trained `VAENetwork`.

    Args:
        shape: sizes of the network.
    """

    kind = "vae"
    prefix = "vae."

    def __init__(self, shape: VAEShape) -> None:
        super().__init__(asdict(shape))
        self.shape = shape
        self.network = VAENetwork(shape)

    @classmethod
    def from_objective(cls, section: Mapping[str, Any]) -> VAE:
        """Return the network of an `objective` section of name `vae`, with fresh weights."""
        return cls(shape_of(VAEShape, section, _CONFIG_KEYS))

    def latent_shape(self, image_size: int) -> tuple[int, int, int]:
        """Return c, h, w; raises UserError where the side is no multiple of the downsampling."""
        side = grid_side(image_size, self.shape.downsampling, network="VAE")
        return self.shape.latent_channels, side, side

    @torch.no_grad()
    @full_float32()
    def encode(self, images: Tensor) -> Tensor:
        """Return mean then scale, float32 `[b, 2, c, h, w]`, of images uint8 `[b, s, s, 3]`."""
        posterior = self.network.posterior(to_pixels(images, self))
        return torch.stack([posterior.mean, posterior.scale], dim=1)

    @torch.no_grad()
    @full_float32()
    def decode(self, latents: Tensor) -> Tensor:
        """Return images uint8 `[b, s, s, 3]` of latents `[b, c, h, w]`, clipped."""
        device = next(self.parameters()).device
        return to_images(self.network.decoder(latents.to(device).float()))
