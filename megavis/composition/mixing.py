"""Mixup and CutMix: mix pairs of images, and their labels in the same proportion.

"mixup: Beyond Empirical Risk Minimization" (Zhang et al.) adds the images with weights λ and 1 - λ;
"CutMix" (Yun et al.) pastes a rectangle of one into the other. With both enabled, either is used
with probability 1/2, as in MAE's recipe.

The code of DeiT and MAE mixes the images of a process with their reverse, all with one λ (`batch`,
timm's default mode). Here samples 2k and 2k + 1 of the sample stream, whose order is random, are
mixed with each other, and a run of consecutive samples shares λ. So results do not depend on
micro-batches or the number of processes.

Legend: b images (an even number), h and w their height and width, c classes.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from megavis.densities.noise_levels import beta_noise
from megavis.parallel.random import uniform


def mix(
    images: Tensor,
    labels: Tensor,
    sample_index: Tensor,
    *,
    num_classes: int,
    mixup: float,
    cutmix: float,
    sharing: int,
    seed: int,
) -> tuple[Tensor, Tensor]:
    """Mix the pairs of a micro-batch.

    Args:
        images: uint8 `[b, h, w, 3]`.
        labels: int64 `[b]`, none missing.
        sample_index: int64 `[b]`, consecutive pairs (2k, 2k + 1).
        mixup: α of λ ~ Beta(α, α) for mixup; 0 disables it.
        cutmix: α of λ ~ Beta(α, α) for CutMix; 0 disables it.
        sharing: consecutive samples that share λ, rectangle, and the choice between the two: 1, 2
            or another even number.

    Returns:
        Mixed images uint8 `[b, h, w, 3]`, and their class probabilities float32 `[b, c]`.
    """
    height, width = images.shape[1:3]
    which, share, row, column = uniform(
        sample_index // sharing, 4, seed=seed, purpose="mixing"
    ).unbind(1)
    sums = _quantile(mixup, share)[:, None, None].expand(-1, height, width)
    outside = 1.0 - rectangles(_quantile(cutmix, share), row, column, height, width)
    cuts = which < (0.5 if mixup else 1.0) * bool(cutmix)
    own = torch.where(cuts[:, None, None], outside, sums)[..., None]
    # Round to uint8: tokens are made from uint8 images, with or without mixing.
    mixed = own * images + (1.0 - own) * _swapped(images)
    # CutMix corrects λ for rectangles that are clipped at the border.
    share = own.mean(dim=(1, 2))
    classes = F.one_hot(labels, num_classes).float()
    return mixed.round().to(torch.uint8), share * classes + (1.0 - share) * _swapped(classes)


def rectangles(share: Tensor, row: Tensor, column: Tensor, height: int, width: int) -> Tensor:
    """Return 1 inside CutMix's rectangles and 0 elsewhere: float32 `[b, h, w]`.

    A rectangle has √(1 - λ) of the image's height and width, where λ is `share`, is centred at
    `row` and `column` in [0, 1), and is clipped at the border; all three are `[b]`.
    """
    ratio = (1.0 - share).clamp(min=0.0).sqrt()

    def inside(middle: Tensor, side: int) -> Tensor:
        length, centre = (ratio * side).floor(), (middle * side).floor()
        first = centre - (length / 2).floor()
        places = torch.arange(side, device=share.device)
        return (places >= first[:, None]) & (places < (first + length)[:, None])

    return (inside(row, height)[:, :, None] & inside(column, width)[:, None, :]).float()


def _swapped(pairs: Tensor) -> Tensor:
    """Swap the rows (0, 1), (2, 3), ... of `[b, ...]`."""
    return pairs.unflatten(0, (-1, 2)).flip(1).flatten(0, 1)


def _quantile(alpha: float, draws: Tensor) -> Tensor:
    """Return λ ~ Beta(α, α) `[b]` for draws in [0, 1); 1 where α is 0."""
    if not alpha:
        return torch.ones_like(draws)
    return beta_noise(alpha, alpha, draws.device).from_uniform(draws)
