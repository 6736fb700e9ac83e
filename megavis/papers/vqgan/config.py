"""The keys of a VQGAN in training: sizes and the weights of its own losses."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from megavis.composition.autoencoder_config import AutoencoderConfig
from megavis.config.schema import Positive
from megavis.config.section import Above0, AtLeast0
from megavis.tokenizers.shapes import VQGANShape


class VQGANConfig(AutoencoderConfig):
    """The keys of the VQGAN: sizes and the weights of its own losses."""

    name: Literal["vqgan"] = "vqgan"
    codebook_size: Annotated[int, Field(gt=1, le=65536)] = 16384
    """K, entries of the codebook; 1024 and 16384 in the released models."""
    code_size: Positive = 256
    """d, numbers of an entry."""
    latent_channels: Positive = 256
    """Channels between the networks and the codebook's own; with `layers: taming`."""
    layers: Literal["taming", "maskgit"] = "taming"
    """Those of the released VQGAN, or of MaskGIT's tokenizer, which MAGE and GVP take: without
    attention, and with nothing between networks and codebook."""
    codebook_weight: AtLeast0 = 1.0
    """Of the squared distance that pulls entries to the vectors that chose them."""
    commitment_weight: AtLeast0 = 0.25
    """β, of the same distance, pulling vectors to their entries."""
    revival_weight: AtLeast0 = 1.0
    """Of the squared distance that pulls entries that no vector of a process's micro-batch chose to
    vectors of it, so that none is dead for good. Neither paper has it."""
    codebook_learning_rate: Above0 | None = None
    """Peak rate of the codebook; optimizer.learning_rate when absent."""

    @property
    def shape(self) -> VQGANShape:
        """The sizes of the network."""
        return VQGANShape(
            codebook_size=self.codebook_size,
            code_size=self.code_size,
            filters=self.filters,
            multipliers=self.multipliers,
            blocks_per_level=self.blocks_per_level,
            latent_channels=self.latent_channels,
            norm_groups=self.norm_groups,
            layers=self.layers,
        )
