"""Shared by tokenizers that downsample an image to a grid: sizes, checks, pixel conversion.

Legend: b images, s side of an image in pixels.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from megavis.config.errors import UserError

Shape = TypeVar("Shape")


def shape_of(
    shape_type: type[Shape], section: Mapping[str, Any], names: Mapping[str, str] | None = None
) -> Shape:
    """Return the sizes of a network from the `objective` section of its run.

    Args:
        shape_type: a dataclass with a field for each size, `multipliers` among them.
        section: of the run's config.
        names: of keys that are not the fields' own, by field.
    """
    known = names or {}
    # There is no type for "any dataclass".
    keys = [field.name for field in fields(shape_type)]  # type: ignore[arg-type]
    sizes = {key: section[known.get(key, key)] for key in keys if known.get(key, key) in section}
    return shape_type(**{**sizes, "multipliers": tuple(sizes["multipliers"])})


def grid_side(image_size: int, downsampling: int, *, network: str) -> int:
    """Return how many places the grid has on a side.

    Raises:
        UserError: the side of the images is no multiple of `downsampling`.
    """
    side, rest = divmod(image_size, downsampling)
    if rest or not side:
        raise UserError(
            f"this {network} takes images whose side is a multiple of {downsampling}, not"
            f" {image_size}"
        )
    return side


def to_pixels(images: Tensor, network: nn.Module) -> Tensor:
    """Return float32 `[b, 3, s, s]` in [0, 1], where the network is, of uint8 `[b, s, s, 3]`."""
    device = next(network.parameters()).device
    return images.to(device).permute(0, 3, 1, 2).float() / 255.0


def to_images(pixels: Tensor) -> Tensor:
    """Return uint8 `[b, s, s, 3]`, clipped, of pixels `[b, 3, s, s]` in about [0, 1]."""
    return (pixels.clamp(0.0, 1.0) * 255.0).round().to(torch.uint8).permute(0, 2, 3, 1)
