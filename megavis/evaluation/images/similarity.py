"""Structural similarity of two images, as scikit-image and the literature have it.

"Image Quality Assessment: From Error Visibility to Structural Similarity" (Wang et al., 2004),
equation 13 with the weights of section III.B: a circular-symmetric Gaussian of 11×11 pixels and
standard deviation 1.5, K₁ = 0.01, K₂ = 0.03; of colour images the mean over the channels.

Legend: b images, H and W pixels.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from megavis.config.errors import UserError

WINDOW = 11
_SIGMA = 1.5
_RANGE = 255.0
_C1, _C2 = (0.01 * _RANGE) ** 2, (0.03 * _RANGE) ** 2


def structural_similarity(first: Tensor, second: Tensor) -> Tensor:
    """Return the mean similarity of each pair of images, over the windows inside them.

    Args:
        first: 0 to 255, `[b, H, W, 3]`.
        second: likewise.

    Returns:
        float64 `[b]`, at most 1.

    Raises:
        UserError: the images are smaller than a window.
    """
    if min(first.shape[1:3]) < WINDOW:
        size = "×".join(map(str, first.shape[1:3]))
        raise UserError(f"SSIM looks through windows of {WINDOW}² pixels; the images have {size}")
    x, y = (images.double().movedim(3, 1) for images in (first, second))
    mean_x, mean_y, mean_xx, mean_yy, mean_xy = _windows(torch.stack([x, y, x * x, y * y, x * y]))
    variances = mean_xx - mean_x**2 + mean_yy - mean_y**2
    covariance = mean_xy - mean_x * mean_y
    likeness = (2 * mean_x * mean_y + _C1) * (2 * covariance + _C2)
    return (likeness / ((mean_x**2 + mean_y**2 + _C1) * (variances + _C2))).flatten(1).mean(1)


def _windows(planes: Tensor) -> Tensor:
    """Return the weighted mean of every window: `[..., H, W]` to `[..., H - 10, W - 10]`."""
    places = torch.arange(WINDOW, device=planes.device, dtype=planes.dtype) - WINDOW // 2
    weights = torch.exp(-0.5 * (places / _SIGMA) ** 2)
    weights = weights / weights.sum()
    flat = planes.reshape(-1, 1, *planes.shape[-2:])
    means = F.conv2d(F.conv2d(flat, weights.view(1, 1, -1, 1)), weights.view(1, 1, 1, -1))
    return means.view(*planes.shape[:-2], *means.shape[-2:])
