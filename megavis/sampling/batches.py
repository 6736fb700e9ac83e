"""Many samples: in batches, shared out over the data-parallel processes.

Legend: b images, n pixels of an image.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from megavis.config.errors import UserError
from megavis.model.runner import Runner
from megavis.objectives.base import PatchByPatch, TokenByToken
from megavis.objectives.trainable import Trainable
from megavis.parallel.context import Axis
from megavis.sampling.autoregressive import generate


def sample_ids(
    runner: Runner,
    objective: Trainable,
    *,
    num_images: int,
    originals: Tensor | None = None,
    num_given: int = 0,
    batch_size: int = 64,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    seed: int = 0,
) -> Tensor:
    """Draw images, or complete the given first part of originals.

    Every process of the job calls this together. What is drawn depends on neither the number of
    processes nor the batch size.

    Args:
        runner: the model, in any layout.
        objective: the paper.
        num_images: images b.
        originals: ids int64 `[b, n]` in raster order, of which the first `num_given` in the run's
            order are given.
        num_given: how many, in [0, n].
        batch_size: images that a process draws at once.
        temperature: see `Choice`, as `top_k` and `top_p`.
        top_k: see `Choice`.
        top_p: see `Choice`.
        seed: decides every draw.

    Returns:
        int64 `[b, n]` in raster order, the same on every process.

    Raises:
        UserError: when the paper cannot be sampled so, or a number is out of range.
    """
    if not isinstance(objective, TokenByToken):
        raise UserError(f"{objective.config.objective.name} is not generated id by id")
    prefix = _prefix(objective, originals, num_images, num_given)

    def draw(numbers: Tensor) -> Tensor:
        ids = generate(
            runner,
            objective,
            batch_size=len(numbers),
            prefix=None if prefix is None else prefix[(numbers % num_images).to(prefix.device)],
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            seed=seed,
            first_image=int(numbers[0]),
        )
        return objective.to_raster(ids)

    return share_out(draw, num_images, batch_size=batch_size, data=runner.context.data)


def share_out(
    draw: Callable[[Tensor], Tensor], num_images: int, *, batch_size: int, data: Axis
) -> Tensor:
    """Draw images in batches, shared out over the data-parallel processes.

    Args:
        draw: draws the images of these numbers, int64 `[b]`; they may lie beyond the last image.
        num_images: how many in all.
        batch_size: images that a process draws at once.
        data: the processes.

    Returns:
        All images in the order of their numbers, the same on every process.
    """
    # All processes draw equally many, beyond the last image if need be: under ZeRO-3 each pass
    # gathers weights, which all must take part in.
    share = -(-num_images // data.size)
    numbers = torch.arange(data.rank * share, (data.rank + 1) * share)
    parts = [draw(chunk) for chunk in numbers.split(batch_size)]
    return _gather(torch.cat(parts), data)[:num_images]


def given_pixels(objective: TokenByToken, num_given: int) -> Tensor:
    """Return bool `[n]` in raster order, true for the first `num_given` in the run's order."""
    given = torch.arange(objective.num_tokens) < num_given
    return objective.to_raster(given[None])[0]


def check_given(
    objective: TokenByToken | PatchByPatch,
    originals: Tensor | None,
    *,
    num_images: int,
    num_given: int,
) -> None:
    """Want at least one image, and a given part that is not larger than it.

    Raises:
        UserError: a number is out of range, or there is nothing to give a part of.
    """
    if num_images < 1:
        raise UserError(f"the number of images must be at least 1, not {num_images}")
    if not 0 <= num_given <= objective.num_tokens:
        raise UserError(f"the given part must lie in 0..{objective.num_tokens}, not {num_given}")
    if originals is None and num_given:
        raise UserError("a given part needs the images that it is taken from")


def _prefix(
    objective: TokenByToken, originals: Tensor | None, num_images: int, num_given: int
) -> Tensor | None:
    check_given(objective, originals, num_images=num_images, num_given=num_given)
    if originals is None:
        return None
    if originals.shape != (num_images, objective.num_tokens):
        raise UserError(
            f"the images have shape {list(originals.shape)}, not"
            f" [{num_images}, {objective.num_tokens}]"
        )
    return objective.to_order(originals)[:, :num_given]


def _gather(mine: Tensor, data: Axis) -> Tensor:
    """Join `[b, ...]` of every data-parallel process in their order."""
    if data.size == 1:
        return mine
    parts = [torch.empty_like(mine) for _ in range(data.size)]
    dist.all_gather(parts, mine.contiguous(), group=data.group)
    return torch.cat(parts)
