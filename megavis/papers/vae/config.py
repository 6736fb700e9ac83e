"""The keys of a VAE in training: sizes (table 6 of GIVT) and the weights of its losses."""

from __future__ import annotations

from typing import Literal

from megavis.composition.autoencoder_config import AutoencoderConfig
from megavis.config.schema import Positive
from megavis.config.section import AtLeast0
from megavis.tokenizers.shapes import VAEShape


class VAEConfig(AutoencoderConfig):
    """The keys of the VAE: sizes (table 6) and the weights of its losses."""

    name: Literal["vae"] = "vae"
    latent_channels: Positive = 16
    """d, real numbers a latent."""
    beta: AtLeast0 = 5e-5
    """β, of the divergence from N(0, 1); 1e-5 for the Large models (table 5)."""
    kl_normalization: Literal["sum", "mean"] = "sum"
    """`sum`: nats an image, over all its latents (section 3.1 flattens them); `mean`: nats a
    number. Neither paper nor code publishes what the image VAE used."""

    @property
    def shape(self) -> VAEShape:
        """The sizes of the network."""
        return VAEShape(
            self.latent_channels,
            self.filters,
            self.multipliers,
            self.blocks_per_level,
            self.norm_groups,
        )
