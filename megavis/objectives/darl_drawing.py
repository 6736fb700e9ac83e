"""One patch of DARL out of noise, given the backbone's output (section 3.3, appendices E and F)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor

from megavis.model.diffusion import clean_from_noise, reverse_process
from megavis.objectives.darl_decoders import PatchHead
from megavis.tokenizers.patches import pixel_range

_SMALLEST_GAMMA = 1e-4
"""Where noise is predicted, x⁰ follows from it only if some of x⁰ is left."""


def draw_from_noise(
    head: PatchHead,
    output: Tensor,
    noise_of: Callable[[int], Tensor],
    schedule: Tensor,
    *,
    predicts: Literal["clean", "noise"],
    temperature: float,
) -> Tensor:
    """Draw a patch for each place by ancestral sampling.

    Args:
        head: denoises.
        output: of the backbone, `[b, s, h]`.
        noise_of: standard normal `[b, s, d]`, new ones for each number.
        schedule: γ from 0 to 1.
        predicts: what the head was trained to give.
        temperature: multiplies noise.

    Returns:
        Standardised patches `[b, s, d]`.
    """
    darkest, brightest = pixel_range()

    def denoise(noisy: Tensor, gamma: Tensor) -> Tensor:
        if predicts == "noise":
            gamma = gamma.clamp(min=_SMALLEST_GAMMA)
        guess = head.decode(output, with_gamma(noisy, gamma)).float()
        if predicts == "noise":
            guess = clean_from_noise(noisy, guess, gamma)
        # An estimate beyond black and white can only be wrong.
        return guess.clamp(darkest, brightest)

    return reverse_process(denoise, noise_of, schedule, temperature=temperature)


def with_gamma(noisy: Tensor, gamma: Tensor) -> Tensor:
    """Put γ `[b, s, 1]` behind noisy patches `[b, s, d]`."""
    return torch.cat([noisy, gamma], dim=-1)
