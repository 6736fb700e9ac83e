"""Images as square patches, and back; no parameters.

Legend: b images, p side of a patch in pixels, n patches of an image, d = 3 · p² numbers of a patch
(row by row, within a row pixel by pixel, each its three channels).

Between a VAE's latents on a grid and the sequence of tokens that GIVT models.

"GIVT: Generative Infinite-Vocabulary Transformers", section 3.2: the grid is read row by row. At
512² pixels (appendix B, table 5) neighbours of a row are stacked into one token, which makes half
as many of twice the size.

Legend: b images, c channels of a latent, h and w the grid, k latents in a token, n tokens of d
numbers: n = h · w / k, d = k · c.

Spectrograms as sequences of frames; no parameters.

Legend: b recordings, n frames, d numbers of a frame (for example cepstral coefficients).
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


def stack(latents: Tensor, count: int) -> Tensor:
    """Stack `count` neighbours of a row: `[b, c, h, w]` to `[b, c · k, h, w / k]`.

    The numbers of one channel are adjacent, as in the released code.
    """
    if count == 1:
        return latents
    pairs = latents.unflatten(3, (-1, count))
    return pairs.permute(0, 1, 4, 2, 3).flatten(1, 2)


def unstack(stacked: Tensor, count: int) -> Tensor:
    """Undo `stack`."""
    if count == 1:
        return stacked
    pairs = stacked.unflatten(1, (-1, count))
    return pairs.permute(0, 1, 3, 4, 2).flatten(3, 4)


def to_tokens(grid: Tensor) -> Tensor:
    """Read a grid `[b, d, h, w]` row by row: `[b, h · w, d]`."""
    return grid.flatten(2).transpose(1, 2)


def to_grid(tokens: Tensor, *, height: int) -> Tensor:
    """Undo `to_tokens`."""
    return tokens.transpose(1, 2).unflatten(2, (height, -1))


_NORM_EPSILON = 1e-5


def standardize_frames(frames: Tensor) -> Tensor:
    """Give each of the d numbers mean 0 and deviation 1 over the frames of a recording.

    Cepstral mean and variance normalisation: it takes away loudness, and the colouring that
    microphone and room give to all frames alike.

    Args:
        frames: float `[b, n, d]`.

    Returns:
        float32 `[b, n, d]`; zeros where a number is the same in all frames.
    """
    wide = frames.float()
    centred = wide - wide.mean(1, keepdim=True)
    variance = centred.square().mean(1, keepdim=True)
    return centred / (variance + _NORM_EPSILON).sqrt()
