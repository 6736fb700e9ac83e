"""Tokens without parameters: image patches, grids of latents, and frames of spectrograms.

A patch has d = 3 · p² values in the order row, column, channel. Grids of latents are read row by
row ("GIVT: Generative Infinite-Vocabulary Transformers", section 3.2); at 512² pixels (appendix B,
table 5) k = 2 horizontally adjacent latents are stacked into one token, so that n = h · w / k and
d = k · c.

Legend: b images or recordings, n tokens (patches, latents or frames), d values of a token, p side
of a patch in pixels, c channels of a latent, h and w height and width of a grid, k latents per
token.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

import torch
from torch import Tensor

# The customary mean and standard deviation of ImageNet's training images in [0, 1].
CHANNEL_MEAN = (0.485, 0.456, 0.406)
CHANNEL_DEVIATION = (0.229, 0.224, 0.225)

Statistics = tuple[Sequence[float], Sequence[float]]
"""Mean and standard deviation of each channel in [0, 1]."""

_EPSILON = 1e-6
_NORM_EPSILON = 1e-5


def standardize(images: Tensor) -> Tensor:
    """Standardise uint8 `[b, height, width, 3]` by ImageNet's channel statistics, to float32."""
    mean, deviation = _channel_statistics(images.device)
    return (images.float() / 255.0 - mean) / deviation


def to_uint8(images: Tensor) -> Tensor:
    """Invert `standardize`: float `[b, height, width, 3]` to the nearest uint8."""
    mean, deviation = _channel_statistics(images.device)
    return ((images.float() * deviation + mean) * 255.0).round().clamp(0, 255).to(torch.uint8)


def for_other_pixels(
    weight: Tensor, bias: Tensor, trained: Statistics, given: Statistics
) -> tuple[Tensor, Tensor]:
    """Adapt an embedding to patches that are standardised differently than in training.

    Args:
        weight: `[h, d]`.
        bias: `[h]`.
        trained: statistics by which the patches of the training images were standardised.
        given: those by which the patches that the result reads are standardised.

    Returns:
        weight and bias, float32.
    """
    (mean, deviation), (given_mean, given_deviation) = (
        (torch.tensor(numbers, dtype=torch.float64) for numbers in each)
        for each in (trained, given)
    )
    # In float64, so that the embedding is rounded only once.
    by_channel = weight.double().unflatten(1, (-1, 3))
    # The pixel as in training is (given pixel · given deviation + given mean - mean) / deviation.
    matrix = by_channel * (given_deviation / deviation)
    shift = (by_channel * ((given_mean - mean) / deviation)).sum((1, 2))
    return matrix.flatten(1).float(), (bias.double() + shift).float()


def pixel_range() -> tuple[float, float]:
    """Return the smallest and largest values that `standardize` can return."""
    ends = [
        (end - mean) / deviation
        for end in (0.0, 1.0)
        for mean, deviation in zip(CHANNEL_MEAN, CHANNEL_DEVIATION, strict=True)
    ]
    return min(ends), max(ends)


def patchify(images: Tensor, patch_size: int) -> Tensor:
    """Cut `[b, height, width, 3]` into patches in raster order, `[b, n, d]`. Raises ValueError."""
    batch, height, width, channels = images.shape
    if height % patch_size or width % patch_size:
        raise ValueError(f"patches of {patch_size} do not divide images of {height} × {width}")
    rows, columns = height // patch_size, width // patch_size
    cells = images.reshape(batch, rows, patch_size, columns, patch_size, channels)
    return cells.transpose(2, 3).reshape(batch, rows * columns, patch_size**2 * channels)


def unpatchify(patches: Tensor, patch_size: int) -> Tensor:
    """Invert `patchify` for square images: `[b, n, d]` to `[b, side, side, 3]`."""
    batch, count, _ = patches.shape
    rows = math.isqrt(count)
    cells = patches.reshape(batch, rows, rows, patch_size, patch_size, -1).transpose(2, 3)
    return cells.reshape(batch, rows * patch_size, rows * patch_size, -1)


def normalize_patches(patches: Tensor) -> Tensor:
    """Standardise each patch `[..., d]` by its own mean and standard deviation.

    "Masked Autoencoders Are Scalable Vision Learners", section 3; like the released code, with the
    unbiased variance plus 1e-6.
    """
    mean, deviation = _own_statistics(patches)
    return (patches - mean) / deviation


def with_statistics_of(patches: Tensor, normalized: Tensor) -> Tensor:
    """Invert `normalize_patches`: scale `normalized` by the statistics of `patches`."""
    mean, deviation = _own_statistics(patches)
    return normalized * deviation + mean


def _own_statistics(patches: Tensor) -> tuple[Tensor, Tensor]:
    """Return mean and standard deviation of each patch, `[..., 1]`."""
    variance = patches.var(-1, keepdim=True)
    return patches.mean(-1, keepdim=True), (variance + _EPSILON).sqrt()


@functools.cache
def _channel_statistics(device: torch.device) -> tuple[Tensor, Tensor]:
    """Return ImageNet's mean and standard deviation, copied once per device."""
    mean = torch.tensor(CHANNEL_MEAN, device=device)
    return mean, torch.tensor(CHANNEL_DEVIATION, device=device)


def stack(latents: Tensor, count: int) -> Tensor:
    """Stack k = `count` horizontally adjacent latents: `[b, c, h, w]` to `[b, c · k, h, w / k]`.

    The values of a channel are adjacent, as in the released code.
    """
    if count == 1:
        return latents
    pairs = latents.unflatten(3, (-1, count))
    return pairs.permute(0, 1, 4, 2, 3).flatten(1, 2)


def unstack(stacked: Tensor, count: int) -> Tensor:
    """Invert `stack`."""
    if count == 1:
        return stacked
    pairs = stacked.unflatten(1, (-1, count))
    return pairs.permute(0, 1, 3, 4, 2).flatten(3, 4)


def to_tokens(grid: Tensor) -> Tensor:
    """Flatten a grid `[b, d, h, w]` row by row: `[b, h · w, d]`."""
    return grid.flatten(2).transpose(1, 2)


def to_grid(tokens: Tensor, *, height: int) -> Tensor:
    """Invert `to_tokens`, for a grid of `height` rows."""
    return tokens.transpose(1, 2).unflatten(2, (height, -1))


def standardize_frames(frames: Tensor) -> Tensor:
    """Standardise each of the d values over the frames of recordings, `[b, n, d]`, to float32.

    Cepstral mean and variance normalisation, which removes loudness and the stationary effects of
    microphone and room. Values that are constant over the frames become zero.
    """
    wide = frames.float()
    centred = wide - wide.mean(1, keepdim=True)
    variance = centred.square().mean(1, keepdim=True)
    return centred / (variance + _NORM_EPSILON).sqrt()
