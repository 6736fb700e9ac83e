"""Config keys of the VAE: sizes (table 6 of GIVT) and loss weights."""

from __future__ import annotations

from typing import Literal

from megavis.composition.shared_keys import AutoencoderConfig
from megavis.config.schema import Positive
from megavis.config.section import AtLeast0
from megavis.tokenizers.shapes import VAEShape


class VAEConfig(AutoencoderConfig):
    """Config keys of the VAE."""

    name: Literal["vae"] = "vae"
    latent_channels: Positive = 16
    """d, channels of a latent."""
    beta: AtLeast0 = 5e-5
    """β, weight of the KL divergence from N(0, 1); 1e-5 for the Large models (table 5)."""
    kl_normalization: Literal["sum", "mean"] = "sum"
    """`sum`: nats per image, summed over all latents (section 3.1 flattens them); `mean`: nats per
    value. Neither paper nor code states which one the image VAE used."""

    @property
    def shape(self) -> VAEShape:
        """Sizes of the network."""
        return VAEShape.from_section(dict(self))
