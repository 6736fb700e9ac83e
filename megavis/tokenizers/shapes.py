"""Sizes of tokenizer networks, shared with their configs."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class VAEShape:
    """Sizes of the network.

    Attributes:
        latent_channels: d, real numbers a latent.
        filters: channels of the first level; a multiple of `groups`.
        multipliers: channels of each level, as multiples of `filters`.
        blocks_per_level: residual blocks a level, and in the middle.
        groups: of each norm. A group of one channel forgets its mean, so a narrow network needs
            fewer groups than the paper's.
    """

    latent_channels: int = 16
    filters: int = 128
    multipliers: tuple[int, ...] = (1, 1, 2, 2, 4)
    blocks_per_level: int = 2
    groups: int = 32

    @property
    def downsampling(self) -> int:
        """Pixels on the side of one latent."""
        return 2 ** (len(self.multipliers) - 1)


@dataclass(frozen=True)
class VQGANShape:
    """Sizes of the network.

    Attributes:
        codebook_size: K; 1024 and 16384 in the released models.
        code_size: d.
        filters: channels of the first level; a multiple of `norm_groups`.
        multipliers: channels of each level, as multiples of `filters`.
        blocks_per_level: residual blocks a level of the encoder; the decoder has one more.
        latent_channels: z.
        norm_groups: of each group norm.
        layers: `taming`, those of the released VQGAN; `maskgit`, those of MaskGIT's tokenizer,
            which are GIVT's VAE's: no attention, and d channels at the coarse end.
    """

    codebook_size: int = 16384
    code_size: int = 256
    filters: int = 128
    multipliers: tuple[int, ...] = (1, 1, 2, 2, 4)
    blocks_per_level: int = 2
    latent_channels: int = 256
    norm_groups: int = 32
    layers: str = "taming"

    @property
    def downsampling(self) -> int:
        """Pixels on the side of one id."""
        return 2 ** (len(self.multipliers) - 1)
