"""Training of the β-VAE whose latents GIVT models.

"GIVT: Generative Infinite-Vocabulary Transformers", section 3.1 and appendix C.2: squared error,
perceptual and adversarial loss after MaskGIT, and β times the KL divergence from N(0, 1).

Legend: b images, H and W pixels, h and w sides of the latent grid, d channels of a latent.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from megavis.composition.autoencoder import AutoencoderObjective, State, posterior_noise
from megavis.papers.vae.config import VAEConfig
from megavis.tokenizers.shapes import VAEShape
from megavis.tokenizers.vae import Posterior, VAENetwork


class VAEObjective(AutoencoderObjective):
    """Reconstruct images from latents with a posterior close to N(0, 1)."""

    config_type = VAEConfig
    paper: VAEConfig

    def build_autoencoder(self) -> nn.Module:
        """Build the VAE."""
        return VAELayer(self.paper.shape)

    def inputs_from(
        self, inputs: Any, *, sample_index: Tensor | None = None, **options: Any
    ) -> tuple[Tensor, ...]:
        """Return pixels and noise.

        Args:
            inputs: images `[b, H, W, 3]`, uint8 or floats in [0, 1].
            sample_index: int64 `[b]`, the samples, which determine the noise; None for zero noise,
                which decodes the mean.
        """
        self.check_options(options)
        pixels = self.pixels_from(inputs)
        side = pixels.shape[-1] // self.paper.shape.downsampling
        shape = (self.paper.latent_channels, side, side)
        return pixels, posterior_noise(pixels, shape, sample_index, self.config.seed)

    def own_terms(self, between: State) -> Mapping[str, Tensor]:
        """Return the KL divergence of the posterior, given its mean and log-variance."""
        kl = Posterior(*between).kl()
        sums = self.paper.kl_normalization == "sum"
        return {"kl": kl.flatten(1).sum(1).mean() if sums else kl.mean()}

    def own_loss(self, terms: Mapping[str, Tensor]) -> Tensor:
        """Return β times the KL divergence."""
        return self.paper.beta * terms["kl"]

    def outputs(self, predictions: State) -> Tensor:
        """Return the posterior's means, then log-variances: `[b, 2 · d, h, w]`."""
        return torch.cat(predictions[2:4], dim=1)

    def plain_network(self, pixels: Tensor) -> Tensor:
        """Decode the mean."""
        network = VAENetwork(self.paper.shape)
        return network.decode(network.posterior(pixels).mean)


class VAELayer(nn.Module):
    """The VAE as the first layer."""

    def __init__(self, shape: VAEShape) -> None:
        super().__init__()
        self.network = VAENetwork(shape)

    def forward(self, inputs: State) -> State:
        """Map pixels `[b, 3, H, W]` in [0, 1] and noise `[b, d, h, w]`.

        Returns:
            Pixels, reconstruction, mean and log-variance.
        """
        pixels, noise = inputs
        pixels = pixels.to(next(self.network.parameters()).dtype)
        reconstruction, posterior = self.network(pixels, noise)
        return pixels, reconstruction, posterior.mean, posterior.log_variance
