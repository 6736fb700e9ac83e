"""Images patch by patch, with the keys and values of earlier patches kept.

"Denoising Autoregressive Representation Learning", section 3.3 and appendix F. What is drawn is a
function of seed, image, place and step alone, so every process of every layout draws the same.

Legend: b images, T patches, p of them given, d numbers of a patch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megavis.config.errors import UserError
from megavis.model.orders import take_places, to_raster
from megavis.model.runner import Runner
from megavis.objectives.base import PatchByPatch
from megavis.parallel.random import normal
from megavis.sampling.autoregressive import without_sequence_parallelism
from megavis.sampling.batches import check_given, share_out
from megavis.sampling.groupwise import patches_to_pixels


def sample_patches(
    runner: Runner,
    objective: PatchByPatch,
    *,
    num_images: int,
    originals: Tensor | None = None,
    num_given: int = 0,
    batch_size: int = 64,
    num_steps: int | None = None,
    temperature: float | None = None,
    seed: int = 0,
) -> Tensor:
    """Draw images, or complete the given first part of originals.

    Every process of the job calls this together. What is drawn depends on neither the number of
    processes nor the batch size.

    Args:
        runner: the model, in any layout.
        objective: the paper.
        num_images: how many.
        originals: uint8 `[num_images, h, w, 3]`, of which the first patches in the run's order are
            given.
        num_given: p, in [0, T].
        batch_size: images that a process draws at once.
        num_steps: from noise to a patch; the config's when absent.
        temperature: multiplies the noise of each step; 1 is the model's own distribution; the
            config's when absent.
        seed: decides every draw.

    Returns:
        uint8 `[num_images, h, w, 3]`, the same on every process.

    Raises:
        UserError: when the paper's models cannot be sampled, or a number is out of range.
    """
    objective.check_drawing()
    _check_numbers(objective, originals, num_images, num_given, num_steps, temperature)
    device = runner.context.device
    known = None if originals is None else objective.patches_of(originals.to(device))

    def draw(numbers: Tensor) -> Tensor:
        numbers = numbers.to(device)
        order = objective.orders(numbers % num_images)
        patches = generate_patches(
            runner,
            objective,
            order=order,
            prefix=_prefix(known, numbers % num_images, order, num_given),
            numbers=numbers,
            num_steps=num_steps,
            temperature=temperature,
            seed=seed,
        )
        return objective.images_of(to_raster(patches, order))

    return share_out(draw, num_images, batch_size=batch_size, data=runner.context.data)


def generate_patches(
    runner: Runner,
    objective: PatchByPatch,
    *,
    order: Tensor,
    prefix: Tensor | None,
    numbers: Tensor,
    num_steps: int | None = None,
    temperature: float | None = None,
    seed: int = 0,
) -> Tensor:
    """Draw one batch.

    Args:
        runner: the model.
        objective: the paper.
        order: int64 `[b, T]`.
        prefix: `[b, p, d]`, the first patches in that order; none when None.
        numbers: int64 `[b]`, which images these are; they decide the draws, with the seed.
        num_steps: see `sample_patches`, as `temperature` and `seed`.
        temperature: see there.
        seed: see there.

    Returns:
        Patches `[b, T, d]` in the order, beginning with the prefix.
    """
    count, width = order.shape[1], objective.num_outputs
    patches = torch.zeros(len(order), count, width, device=order.device)
    num_given = 0
    if prefix is not None:
        num_given = prefix.shape[1]
        patches[:, :num_given] = prefix
    cache = runner.cache(count, num_sequences=len(order)) if objective.keeps_keys else None
    with runner.evaluating(), without_sequence_parallelism(runner.layers):
        for place in range(num_given, count):
            finish = _Draw(objective, numbers, place, seed, num_steps, temperature)
            # The first pass takes all that is given at once, every later one a single token.
            start = 0 if cache is None else cache.length
            inputs = objective.inputs_between(patches, order, start, place + 1)
            patches[:, place] = runner.predictions(inputs, cache=cache, finish=finish)
    return patches


@dataclass(frozen=True)
class _Draw:
    """Draws one patch of each image, in the place of the head."""

    objective: PatchByPatch
    numbers: Tensor
    place: int
    seed: int
    num_steps: int | None
    temperature: float | None

    def __call__(self, head: Any, state: Any) -> Tensor:
        return self.objective.draw_patch(
            head, state, self._noise, num_steps=self.num_steps, temperature=self.temperature
        ).float()

    def _noise(self, step: int) -> Tensor:
        purpose = f"patch {self.place} step {step}"
        width = self.objective.num_outputs
        return normal(self.numbers, width, seed=self.seed, purpose=purpose)


def given_part(objective: PatchByPatch, images: Tensor, num_given: int) -> Tensor:
    """Return which pixels of `images` uint8 `[b, h, w, 3]` are given: bool `[b, h, w]`."""
    order = objective.orders(torch.arange(len(images), device=images.device))
    given = torch.arange(order.shape[1], device=order.device) < num_given
    cells = to_raster(given.expand(len(order), -1), order)
    return patches_to_pixels(cells, *images.shape[1:3])


def _prefix(known: Tensor | None, which: Tensor, order: Tensor, num_given: int) -> Tensor | None:
    if known is None or num_given == 0:
        return None
    return take_places(known[which], order[:, :num_given])


def _check_numbers(
    objective: PatchByPatch,
    originals: Tensor | None,
    num_images: int,
    num_given: int,
    num_steps: int | None,
    temperature: float | None,
) -> None:
    check_given(objective, originals, num_images=num_images, num_given=num_given)
    if num_steps is not None and num_steps < 1:
        raise UserError(f"the number of steps must be at least 1, not {num_steps}")
    if temperature is not None and temperature < 0:
        raise UserError(f"the temperature must be at least 0, not {temperature}")
    if originals is not None and len(originals) != num_images:
        raise UserError(f"{num_images} images were asked for and {len(originals)} given")
