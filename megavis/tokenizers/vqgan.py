"""The convolutional VQGAN as a tokenizer: images to codebook ids and back.

"Taming Transformers for High-Resolution Image Synthesis" (2021), table 7: residual blocks, half the
resolution per level, attention in the coarsest level and in the middle. Modules have the names of
the released checkpoints, so that these can be loaded directly. MaskGIT's tokenizer ("MaskGIT:
Masked Generative Image Transformer", 2022), which MAGE and GVP use, has the layers of GIVT's VAE
instead, takes pixels in [0, 1], and has no convolutions around the codebook.

Legend: b images, H and W pixels, s side of a square image in pixels, n ids of an image, h and w
sides of their grid, z channels of the encoder's output, d channels of a codebook entry, K entries.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megavis.parallel.device import full_float32
from megavis.tokenizers.network_tokenizer import (
    IdTokenizer,
    grid_side,
    to_images,
    to_pixels,
)
from megavis.tokenizers.shapes import VAEShape, VQGANShape
from megavis.tokenizers.taming_layers import VQGANDecoder, VQGANEncoder
from megavis.tokenizers.vae import VAEDecoder, VAEEncoder, initialize


class VQGAN(IdTokenizer):
    """A trained `VQGANNetwork`."""

    kind = "vqgan"
    prefix = "vqgan."

    def __init__(self, shape: VQGANShape) -> None:
        settings = asdict(shape)
        for key in ("layers", "normalize_codes"):
            # Omit defaults, so that networks trained before these options keep their identity.
            if settings[key] == getattr(VQGANShape, key):
                del settings[key]
        super().__init__(settings)
        self.shape = shape
        self.network = VQGANNetwork(shape)

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> VQGAN:
        """Build the network of a run of objective `vqgan`, with initial weights."""
        return cls(VQGANShape.from_section(config["objective"]))

    @property
    def vocabulary_size(self) -> int:
        """Entries of the codebook."""
        return self.shape.codebook_size

    @property
    def feature_size(self) -> int:
        """Channels of a codebook entry."""
        return self.shape.code_size

    def num_tokens(self, image_size: int) -> int:
        """Return ids per image; raise UserError if downsampling does not divide the size."""
        return grid_side(image_size, self.shape.downsampling, network="VQGAN") ** 2

    @torch.no_grad()
    @full_float32()
    def features(self, images: Tensor) -> Tensor:
        """Encode images uint8 `[b, s, s, 3]`, without quantization, as float32 `[b, n, d]`."""
        return self._vectors(images).flatten(2).mT

    @torch.no_grad()
    @full_float32()
    def encode(self, images: Tensor) -> Tensor:
        """Encode images uint8 `[b, s, s, 3]` as ids int64 `[b, n]` in raster order."""
        return self.network.quantize(self._vectors(images)).ids.flatten(1)

    def _vectors(self, images: Tensor) -> Tensor:
        """Return the vectors before quantization, `[b, d, h, w]`."""
        return self.network.vectors(to_pixels(images, self))

    @torch.no_grad()
    @full_float32()
    def decode(self, ids: Tensor) -> Tensor:
        """Decode ids int64 `[b, n]` of a square grid to images uint8 `[b, s, s, 3]`, clipped."""
        side = round(ids.shape[1] ** 0.5)
        grid = ids.to(next(self.parameters()).device).unflatten(1, (side, side))
        return to_images(self.network.decode(self.network.quantize.codes(grid)))


class VQGANNetwork(nn.Module):
    """Encoder, codebook and decoder."""

    def __init__(self, shape: VQGANShape) -> None:
        super().__init__()
        self.shape, code = shape, shape.code_size
        self.is_maskgit = shape.layers == "maskgit"
        coarse = code if self.is_maskgit else shape.latent_channels
        vae = VAEShape(
            latent_channels=code,
            filters=shape.filters,
            multipliers=shape.multipliers,
            blocks_per_level=shape.blocks_per_level,
            groups=shape.norm_groups,
        )
        self.encoder: nn.Module = (
            VAEEncoder(vae, outputs=code) if self.is_maskgit else VQGANEncoder(shape)
        )
        self.quant_conv = self._around(coarse, code)
        self.quantize = Codebook(shape.codebook_size, code, normalized=shape.normalize_codes)
        self.post_quant_conv = self._around(code, coarse)
        self.decoder: nn.Module = VAEDecoder(vae) if self.is_maskgit else VQGANDecoder(shape)
        if self.is_maskgit:
            initialize(self)

    def _around(self, inputs: int, outputs: int) -> nn.Module:
        """Return the convolution before or after the codebook; MaskGIT has none."""
        return nn.Identity() if self.is_maskgit else nn.Conv2d(inputs, outputs, 1)

    def vectors(self, pixels: Tensor) -> Tensor:
        """Encode pixels `[b, 3, H, W]` in [0, 1] as vectors `[b, d, h, w]`, not yet quantized."""
        vectors: Tensor = self.quant_conv(
            self.encoder(pixels if self.is_maskgit else 2.0 * pixels - 1.0)
        )
        return F.normalize(vectors, dim=1) if self.quantize.normalized else vectors

    def decode(self, codes: Tensor) -> Tensor:
        """Decode codes `[b, d, h, w]` to pixels `[b, 3, H, W]`, not clipped to [0, 1]."""
        pixels: Tensor = self.decoder(self.post_quant_conv(codes))
        return pixels if self.is_maskgit else (pixels + 1.0) / 2.0

    def forward(self, pixels: Tensor) -> tuple[Tensor, Tensor, Quantized]:
        """Reconstruct images `[b, 3, H, W]` in [0, 1], with a straight-through gradient.

        Returns:
            Reconstructed pixels, not clipped; the vectors `[b, d, h, w]`; and their codes and ids.
        """
        vectors = self.vectors(pixels)
        quantized = self.quantize(vectors)
        straight = vectors + (quantized.codes.detach().to(vectors.dtype) - vectors.detach())
        return self.decode(straight), vectors, quantized


@dataclass(frozen=True)
class Quantized:
    """A quantized grid of vectors.

    Attributes:
        codes: nearest entries `[b, d, h, w]`, differentiable with respect to the codebook.
        ids: their indices, int64 `[b, h, w]`.
    """

    codes: Tensor
    ids: Tensor


class Codebook(nn.Module):
    """A learned codebook of K vectors, which quantizes to the nearest one.

    If `normalized`, the entries are its weights scaled to length 1.
    """

    def __init__(self, size: int, code_size: int, *, normalized: bool = False) -> None:
        super().__init__()
        self.normalized = normalized
        self.embedding = nn.Embedding(size, code_size)
        # The initialization of taming-transformers.
        nn.init.uniform_(self.embedding.weight, -1.0 / size, 1.0 / size)
        if normalized:
            # The length of a weight divides its gradient.
            with torch.no_grad():
                self.embedding.weight.copy_(F.normalize(self.embedding.weight, dim=1))

    @property
    def entries(self) -> Tensor:
        """Entries `[K, d]`, differentiable."""
        weight = self.embedding.weight
        return F.normalize(weight.float(), dim=1) if self.normalized else weight

    def forward(self, vectors: Tensor) -> Quantized:
        """Quantize `[b, d, h, w]` to the nearest entries by squared distance, in float32."""
        entries = self.entries.float()
        flat = vectors.detach().float().permute(0, 2, 3, 1).flatten(0, 2)
        # |v|² is constant over the entries.
        distances = entries.square().sum(1) - 2.0 * flat @ entries.detach().t()
        ids = distances.argmin(1).unflatten(0, (len(vectors), *vectors.shape[2:]))
        return Quantized(self.codes(ids), ids)

    def codes(self, ids: Tensor) -> Tensor:
        """Look up ids `[b, h, w]`: entries `[b, d, h, w]`."""
        return F.embedding(ids, self.entries).permute(0, 3, 1, 2)


def usage(ids: Tensor, size: int) -> Tensor:
    """Count how often each of `size` entries is used: float32 `[size]`."""
    flat = ids.flatten()
    counts = torch.zeros(size, device=ids.device)
    # Unlike torch.bincount, this does not synchronize with the device.
    return counts.scatter_add_(0, flat, torch.ones_like(flat, dtype=counts.dtype))
