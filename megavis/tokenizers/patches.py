"""Images as square patches, and back; no parameters.

Legend: b images, p side of a patch in pixels, n patches of an image, d = 3 · p² numbers of a patch
(row by row, within a row pixel by pixel, each its three channels).
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

# Mean and deviation of ImageNet's training images, in [0, 1], as the field has them.
CHANNEL_MEAN = (0.485, 0.456, 0.406)
CHANNEL_DEVIATION = (0.229, 0.224, 0.225)

_EPSILON = 1e-6


def standardize(images: Tensor) -> Tensor:
    """Map uint8 `[b, height, width, 3]` to float32 of mean 0 and deviation 1 over ImageNet."""
    mean, deviation = _channel_statistics(images.device)
    return (images.float() / 255.0 - mean) / deviation


def to_uint8(images: Tensor) -> Tensor:
    """Undo `standardize`: float `[b, height, width, 3]` to the nearest uint8."""
    mean, deviation = _channel_statistics(images.device)
    return ((images.float() * deviation + mean) * 255.0).round().clamp(0, 255).to(torch.uint8)


def pixel_range() -> tuple[float, float]:
    """Return the smallest and the largest number that `standardize` gives."""
    ends = [
        (end - mean) / deviation
        for end in (0.0, 1.0)
        for mean, deviation in zip(CHANNEL_MEAN, CHANNEL_DEVIATION, strict=True)
    ]
    return min(ends), max(ends)


def patchify(images: Tensor, patch_size: int) -> Tensor:
    """Cut `[b, height, width, 3]` into patches in raster order: `[b, n, d]`.

    Raises:
        ValueError: `patch_size` does not divide both sides.
    """
    batch, height, width, channels = images.shape
    if height % patch_size or width % patch_size:
        raise ValueError(f"patches of {patch_size} do not divide images of {height} × {width}")
    rows, columns = height // patch_size, width // patch_size
    cells = images.reshape(batch, rows, patch_size, columns, patch_size, channels)
    return cells.transpose(2, 3).reshape(batch, rows * columns, patch_size**2 * channels)


def unpatchify(patches: Tensor, patch_size: int, *, rows: int | None = None) -> Tensor:
    """Undo `patchify`: `[b, n, d]` to `[b, height, width, 3]`.

    Args:
        patches: in raster order.
        patch_size: p.
        rows: of patches; √n when absent.

    Raises:
        ValueError: n patches do not make so many rows.
    """
    batch, count, _ = patches.shape
    rows = rows or round(count**0.5)
    columns = count // rows
    if rows * columns != count:
        raise ValueError(f"{count} patches do not make {rows} rows")
    cells = patches.reshape(batch, rows, columns, patch_size, patch_size, -1).transpose(2, 3)
    return cells.reshape(batch, rows * patch_size, columns * patch_size, -1)


def normalize_patches(patches: Tensor) -> Tensor:
    """Give each patch mean 0 and variance 1 over its numbers: `[..., d]`.

    "Masked Autoencoders Are Scalable Vision Learners", section 3; as its released code, the
    variance is the unbiased one, with 1e-6 added.
    """
    mean, deviation = _own_statistics(patches)
    return (patches - mean) / deviation


def with_statistics_of(patches: Tensor, normalized: Tensor) -> Tensor:
    """Undo `normalize_patches`: give each of `normalized` mean and deviation of its patch."""
    mean, deviation = _own_statistics(patches)
    return normalized * deviation + mean


def _own_statistics(patches: Tensor) -> tuple[Tensor, Tensor]:
    """Return mean and deviation of each patch, `[..., 1]`."""
    variance = patches.var(-1, keepdim=True)
    return patches.mean(-1, keepdim=True), (variance + _EPSILON).sqrt()


@functools.cache
def _channel_statistics(device: torch.device) -> tuple[Tensor, Tensor]:
    """Return mean and deviation; sent to a device once, since a copy waits for the host."""
    mean = torch.tensor(CHANNEL_MEAN, device=device)
    return mean, torch.tensor(CHANNEL_DEVIATION, device=device)
