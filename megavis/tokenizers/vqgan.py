"""The VQGAN as a tokenizer: images to ids, and ids to images."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor

from megavis.parallel.device import full_float32
from megavis.tokenizers.base import IdTokenizer
from megavis.tokenizers.grids import grid_side, shape_of, to_images, to_pixels
from megavis.tokenizers.shapes import VQGANShape
from megavis.tokenizers.vqgan_network import VQGANNetwork


class VQGAN(IdTokenizer):
    """A trained `VQGANNetwork`.

    Args:
        shape: sizes of the network.
    """

    kind = "vqgan"
    prefix = "vqgan."

    def __init__(self, shape: VQGANShape) -> None:
        settings = asdict(shape)
        if shape.layers == VQGANShape.layers:
            # Networks that were trained before there was a choice keep their identity.
            del settings["layers"]
        super().__init__(settings)
        self.shape = shape
        self.network = VQGANNetwork(shape)

    @classmethod
    def from_objective(cls, section: Mapping[str, Any]) -> VQGAN:
        """Return the network of an `objective` section of name `vqgan`, with fresh weights."""
        return cls(shape_of(VQGANShape, section))

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
        return grid_side(image_size, self.shape.downsampling, network="VQGAN") ** 2

    @torch.no_grad()
    @full_float32()
    def features(self, images: Tensor) -> Tensor:
        """Return the encoder's vectors, float32 `[b, n, d]`, of images uint8 `[b, s, s, 3]`."""
        return self._vectors(images).flatten(2).mT

    @torch.no_grad()
    @full_float32()
    def encode(self, images: Tensor) -> Tensor:
        """Return ids int64 `[b, n]` in raster order, of images uint8 `[b, s, s, 3]`."""
        return self.network.quantize(self._vectors(images)).ids.flatten(1)

    def _vectors(self, images: Tensor) -> Tensor:
        """Return what is to be quantized, `[b, d, h, w]`."""
        return self.network.vectors(to_pixels(images, self))

    @torch.no_grad()
    @full_float32()
    def decode(self, ids: Tensor) -> Tensor:
        """Return images uint8 `[b, s, s, 3]` of ids int64 `[b, n]` of a square grid, clipped."""
        side = round(ids.shape[1] ** 0.5)
        grid = ids.to(next(self.parameters()).device).unflatten(1, (side, side))
        return to_images(self.network.decode(self.network.quantize.codes(grid)))
