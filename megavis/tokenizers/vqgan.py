"""The VQGAN as a tokenizer: images to ids, and ids to images."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, fields
from typing import Any

import torch
from torch import Tensor

from megavis.config.errors import UserError
from megavis.tokenizers.base import IdTokenizer
from megavis.tokenizers.vqgan_network import VQGANNetwork, VQGANShape


class VQGAN(IdTokenizer):
    """A trained `VQGANNetwork`.

    Args:
        shape: sizes of the network.
    """

    kind = "vqgan"
    prefix = "vqgan."

    def __init__(self, shape: VQGANShape) -> None:
        super().__init__(asdict(shape))
        self.shape = shape
        self.network = VQGANNetwork(shape)

    @classmethod
    def from_objective(cls, section: Mapping[str, Any]) -> VQGAN:
        """Return the network of an `objective` section of name `vqgan`, with fresh weights."""
        sizes = {field.name: section[field.name] for field in fields(VQGANShape)}
        return cls(VQGANShape(**{**sizes, "multipliers": tuple(sizes["multipliers"])}))

    @property
    def vocabulary_size(self) -> int:
        """Entries of the codebook."""
        return self.shape.codebook_size

    @property
    def feature_size(self) -> int:
        """Numbers of an entry."""
        return self.shape.code_size

    def num_tokens(self, image_size: int) -> int:
        """Return ids an image; raises UserError where the side does not divide."""
        side, rest = divmod(image_size, self.shape.downsampling)
        if rest or not side:
            raise UserError(
                f"this VQGAN takes images whose side is a multiple of {self.shape.downsampling}, "
                f"not {image_size}"
            )
        return side * side

    @torch.no_grad()
    def features(self, images: Tensor) -> Tensor:
        """Return the encoder's vectors, float32 `[b, n, d]`, of images uint8 `[b, s, s, 3]`."""
        return self._vectors(images).flatten(2).mT

    @torch.no_grad()
    def encode(self, images: Tensor) -> Tensor:
        """Return ids int64 `[b, n]` in raster order, of images uint8 `[b, s, s, 3]`."""
        return self.network.quantize(self._vectors(images)).ids.flatten(1)

    def _vectors(self, images: Tensor) -> Tensor:
        """Return what is to be quantized, `[b, d, h, w]`."""
        device = next(self.parameters()).device
        pixels = images.to(device).permute(0, 3, 1, 2).float() / 255.0
        return self.network.vectors(pixels)

    @torch.no_grad()
    def decode(self, ids: Tensor) -> Tensor:
        """Return images uint8 `[b, s, s, 3]` of ids int64 `[b, n]` of a square grid, clipped."""
        side = round(ids.shape[1] ** 0.5)
        grid = ids.to(next(self.parameters()).device).unflatten(1, (side, side))
        pixels = self.network.decode(self.network.quantize.codes(grid)).clamp(0.0, 1.0)
        return (pixels * 255.0).round().to(torch.uint8).permute(0, 2, 3, 1)
