"""Sizes of the tokenizer networks, without torch, so that configs can use them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Self

_KEYS = {"groups": "norm_groups"}  # config keys that differ from the field's name


@dataclass(frozen=True)
class _Levels:
    """Sizes of a network that halves the resolution between levels.

    Attributes:
        multipliers: channels of each level as multiples of the first level's.
    """

    multipliers: tuple[int, ...] = (1, 1, 2, 2, 4)

    @property
    def downsampling(self) -> int:
        """Pixels per latent or id along each side."""
        return 2 ** (len(self.multipliers) - 1)

    @classmethod
    def from_section(cls, section: Mapping[str, Any]) -> Self:
        """Return the sizes in the `objective` section of a config."""
        names = [field.name for field in fields(cls)]
        sizes = {name: section[key] for name in names if (key := _KEYS.get(name, name)) in section}
        # Config files have lists.
        lists = ("multipliers", "attention_levels")
        return cls(**sizes | {name: tuple(sizes[name]) for name in lists if name in sizes})


@dataclass(frozen=True)
class VAEShape(_Levels):
    """Sizes of a `VAENetwork`.

    Attributes:
        latent_channels: d, channels of a latent.
        filters: channels of the first level, a multiple of `groups`.
        blocks_per_level: residual blocks per level, and in the middle.
        groups: groups of each group norm. A group of one channel loses its mean, so narrow networks
            need fewer groups than the paper's.
        layers: `maskgit` for those of GIVT's VAE; `taming` for those of LDM's, which are the
            VQGAN's, with 1×1 convolutions around the latents.
        attention_levels: coarsest levels with attention in encoder and decoder, of `taming`.
    """

    latent_channels: int = 16
    filters: int = 128
    blocks_per_level: int = 2
    groups: int = 32
    layers: str = "maskgit"
    attention_levels: tuple[int, int] = (1, 1)


@dataclass(frozen=True)
class VQGANShape(_Levels):
    """Sizes of a `VQGANNetwork`.

    Attributes:
        codebook_size: K; 1024 and 16384 in the released models.
        code_size: d, channels of a codebook entry.
        filters: channels of the first level, a multiple of `norm_groups`.
        blocks_per_level: residual blocks per level of the encoder; the decoder has one more.
        latent_channels: z, channels of the encoder's output.
        norm_groups: groups of each group norm.
        layers: `taming` for the released VQGAN's; `maskgit` for MaskGIT's
            tokenizer, which GIVT's VAE shares: no attention, and d channels after the encoder.
        normalize_codes: scale vectors and entries to length 1.
    """

    codebook_size: int = 16384
    code_size: int = 256
    filters: int = 128
    blocks_per_level: int = 2
    latent_channels: int = 256
    norm_groups: int = 32
    layers: str = "taming"
    normalize_codes: bool = False
