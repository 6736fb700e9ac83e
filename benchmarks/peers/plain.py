"""The parts of a plain training loop, written without megavis."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

IMAGENET_MEAN, IMAGENET_DEVIATION = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
BETAS = (0.9, 0.95)


def pixels(images: Tensor) -> Tensor:
    """Standardise uint8 `[b, h, w, 3]` by ImageNet's statistics: float32 `[b, 3, h, w]`."""
    shape = (1, 3, 1, 1)
    mean, deviation = torch.tensor(IMAGENET_MEAN), torch.tensor(IMAGENET_DEVIATION)
    scaled = images.permute(0, 3, 1, 2).float() / 255
    return (scaled - mean.view(shape)) / deviation.view(shape)


def cosine_rate(step: int, *, peak: float, warmup: int, steps: int) -> float:
    """Return the learning rate of a step, counted from 0: a rise over `warmup`, then a cosine."""
    if step < warmup:
        return peak * (step + 1) / warmup
    share = (step - warmup) / (steps - warmup)
    return peak * (1 + math.cos(math.pi * share)) / 2


def adamw(groups: Iterable[dict[str, Any]], *, rate: float) -> torch.optim.AdamW:
    """Return torch's AdamW with the decay rates of MAE and iGPT."""
    return torch.optim.AdamW(list(groups), lr=rate, betas=BETAS, eps=1e-8)


def decay_matrices(model: torch.nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Return two groups: tensors of several dimensions decay, vectors do not."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return [
        {"params": [p for p in trained if p.ndim > 1], "weight_decay": weight_decay},
        {"params": [p for p in trained if p.ndim <= 1], "weight_decay": 0.0},
    ]


def step_of(
    optimizer: torch.optim.Optimizer,
    set_rates: Callable[[int], None],
    loss_of: Callable[[Any], Tensor],
) -> Callable[[Any, int], float]:
    """Return a function that takes one step on a batch, given its number, and returns the loss."""

    def step(batch: Any, number: int) -> float:
        set_rates(number)
        loss = loss_of(batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return float(loss.detach())

    return step


@torch.no_grad()
def round_once(model: torch.nn.Module) -> None:
    """Change the trained weights by one float32 rounding, up or down at random."""
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        if parameter.requires_grad:
            sign = torch.randint(2, parameter.shape, generator=generator) * 2 - 1
            parameter.mul_(1 + sign * 2.0**-23)
