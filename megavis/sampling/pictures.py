"""From a model to the pictures of a run: samples, completions, reconstructions.

Legend: b images, n pixels of an image.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from torch import Tensor

from megavis.model.runner import Runner
from megavis.objectives.base import PatchByPatch, TokenByToken
from megavis.objectives.trainable import Reconstructs, Trainable
from megavis.sampling.batches import given_pixels, sample_ids
from megavis.sampling.grids import completion_grid, image_grid, sample_grid
from megavis.sampling.groupwise import GroupByGroup, fill, patches_to_pixels
from megavis.sampling.patchwise import given_part, sample_patches
from megavis.tokenizers.palette import Palette


def to_pixels(ids: Tensor, palette: Palette) -> np.ndarray:
    """Return the colours of square images: ids `[b, n]` in raster order to uint8 `[b, h, w, 3]`.

    Raises:
        ValueError: n is not a square.
    """
    side = round(ids.shape[1] ** 0.5)
    if side * side != ids.shape[1]:
        raise ValueError(f"{ids.shape[1]} pixels do not make a square")
    # A model may have more outputs than the palette colours; it learns never to use them.
    known = ids.clamp(max=palette.num_tokens - 1)
    return palette.decode(known.cpu().numpy()).reshape(-1, side, side, 3)


def picture_of_samples(
    runner: Runner, objective: Trainable, palette: Palette, *, num_images: int, **options: Any
) -> np.ndarray:
    """Draw images and put them into a grid; every process calls this together.

    Args:
        runner: the model.
        objective: the paper.
        palette: colours of the ids.
        num_images: how many.
        **options: as `sample_ids` takes them: temperature, top_k, top_p, seed, batch_size.

    Returns:
        uint8 `[H, W, 3]`.
    """
    ids = sample_ids(runner, objective, num_images=num_images, **options)
    return sample_grid(to_pixels(ids, palette))


def picture_of_completions(
    runner: Runner,
    objective: Trainable,
    palette: Palette,
    *,
    originals: Tensor,
    num_given: int,
    num_completions: int = 1,
    seed: int = 0,
    **options: Any,
) -> np.ndarray:
    """Complete the first part of each image; every process calls this together.

    Args:
        runner: the model.
        objective: the paper.
        palette: colours of the ids.
        originals: ids int64 `[b, n]` in raster order.
        num_given: how many pixels, first in the run's order, the model sees.
        num_completions: completions of each image, each with draws of its own.
        seed: decides every draw.
        **options: as `sample_ids` takes them.

    Returns:
        uint8 `[H, W, 3]`, a row an image: original | what was given | completions.
    """
    assert isinstance(objective, TokenByToken)
    repeated = originals.repeat(num_completions, 1)
    completed = sample_ids(
        runner,
        objective,
        num_images=len(repeated),
        originals=repeated,
        num_given=num_given,
        seed=seed,
        **options,
    )
    pixels = to_pixels(originals, palette)
    given = given_pixels(objective, num_given).numpy().reshape(pixels.shape[1:3])
    columns = [to_pixels(ids, palette) for ids in completed.split(len(originals))]
    return completion_grid(pixels, given, columns)


def picture_of_reconstructions(
    runner: Runner, objective: Reconstructs, originals: Tensor
) -> np.ndarray:
    """Show images above what a tokenizer makes of them; every process calls this together.

    Args:
        runner: the model.
        objective: the tokenizer in training.
        originals: uint8 `[b, H, W, 3]`.

    Returns:
        uint8 `[H, W, 3]`, pairs of rows: originals, reconstructions.
    """
    inputs = objective.inputs_from(originals.to(runner.context.device))
    made = objective.reconstruction(runner.predictions(inputs)).cpu().numpy()
    images, columns = originals.cpu().numpy(), min(len(originals), 8)
    rows = []
    for start in range(0, len(images) - columns + 1, columns):
        part = slice(start, start + columns)
        rows += [list(images[part]), list(made[part])]
    return image_grid(rows)


def picture_of_patches(
    runner: Runner,
    objective: PatchByPatch,
    *,
    originals: Tensor | None,
    num_images: int,
    num_given: int = 0,
    num_completions: int = 1,
    **options: Any,
) -> np.ndarray:
    """Draw images patch by patch, or complete some; every process calls this together.

    Args:
        runner: the model.
        objective: the paper.
        originals: uint8 `[b, H, W, 3]` to complete; None draws from nothing.
        num_images: how many, from nothing.
        num_given: how many patches, first in the run's order, the model sees.
        num_completions: completions of each original, each with draws of its own.
        **options: as `sample_patches` takes them: num_steps, temperature, seed, batch_size.

    Returns:
        uint8 `[H, W, 3]`; with originals a row an image: original | what was given | completions.
    """
    if originals is None:
        drawn = sample_patches(runner, objective, num_images=num_images, **options)
        return sample_grid(drawn.cpu().numpy())
    seed = options.pop("seed", 0)
    columns = [
        sample_patches(
            runner,
            objective,
            num_images=len(originals),
            originals=originals,
            num_given=num_given,
            seed=seed + number,
            **options,
        )
        for number in range(num_completions)
    ]
    given = given_part(objective, originals, num_given).cpu().numpy()
    return completion_grid(
        originals.cpu().numpy(), given, [column.cpu().numpy() for column in columns]
    )


def picture_of_fillings(
    runner: Runner,
    objective: GroupByGroup,
    *,
    originals: Tensor,
    counts: Sequence[int],
    **options: Any,
) -> np.ndarray:
    """Show how hidden patches are filled in, a column for each number of groups.

    Args:
        runner: the model.
        objective: the paper.
        originals: uint8 `[b, H, W, 3]`.
        counts: numbers of groups.
        **options: as `fill` takes them: share_given, seed.

    Returns:
        uint8 `[H, W, 3]`, a row an image: original | what was given | filled in.
    """
    fillings = [fill(runner, objective, originals, num_groups=n, **options) for n in counts]
    images = originals.cpu().numpy()
    given = patches_to_pixels(fillings[0].given, *images.shape[1:3]).cpu().numpy()
    return completion_grid(images, given, [filled.images.cpu().numpy() for filled in fillings])
