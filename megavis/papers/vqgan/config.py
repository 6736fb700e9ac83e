"""Config keys of the VQGAN: sizes and loss weights."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from megavis.config.autoencoder import AutoencoderConfig
from megavis.config.schema import Positive
from megavis.config.section import Above0, AtLeast0
from megavis.tokenizers.shapes import VQGANShape


class VQGANConfig(AutoencoderConfig):
    """Config keys of the VQGAN."""

    name: Literal["vqgan"] = "vqgan"
    codebook_size: Annotated[int, Field(gt=1, le=65536)] = 16384
    """K, entries of the codebook; 1024 and 16384 in the released models."""
    code_size: Positive = 256
    """d, channels of a codebook entry."""
    latent_channels: Positive = 256
    """Channels of the encoder's output, with `layers: taming`."""
    layers: Literal["taming", "maskgit"] = "taming"
    """`taming`: the layers of the released VQGAN. `maskgit`: those of MaskGIT's tokenizer, used by
    MAGE and GVP, without attention and without convolutions around the codebook."""
    normalize_codes: bool = False
    """Scale vectors and entries to length 1, so that the nearest entry is the one with the most
    similar direction: "Vector-quantized Image Modeling with Improved VQGAN", section 3.2."""
    codebook_weight: AtLeast0 = 1.0
    """Weight of the codebook loss, which pulls entries towards the vectors assigned to them."""
    commitment_weight: AtLeast0 = 0.25
    """β, weight of the commitment loss, which pulls vectors towards their entries."""
    revival_weight: AtLeast0 = 1.0
    """Weight of the squared distance that pulls entries unused in a process's micro-batch towards
    its vectors, so that no entry stays dead. Not part of either paper."""
    codebook_learning_rate: Above0 | None = None
    """Peak learning rate of the codebook; defaults to optimizer.learning_rate."""

    @property
    def shape(self) -> VQGANShape:
        """Sizes of the network."""
        return VQGANShape.from_section(dict(self))
