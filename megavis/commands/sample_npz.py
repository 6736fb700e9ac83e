"""`megavis sample --npz`: many images of any run that draws some, for evaluation."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from megavis.config.errors import UserError

if TYPE_CHECKING:
    from torch import Tensor

    from megavis.notebook import Run
    from megavis.objectives.base import PatchByPatch
    from megavis.sampling.npz import Draw


def write_samples(opened: Run, args: argparse.Namespace) -> None:
    """Draw --num-images images from nothing into `args.npz`.

    Raises:
        UserError: the run draws no images so, or the file was begun with other settings.
    """
    from megavis.sampling.npz import write_npz

    if args.prefix:
        raise UserError("--npz holds images from nothing; leave --prefix out")
    draw, settings = drawing_of(opened, args)
    write_npz(
        args.npz,
        draw,
        num_images=args.num_images,
        batch_size=args.batch_size,
        context=opened.context,
        settings={"step": opened.step, "seed": args.seed, **settings},
    )
    if opened.context.is_main:
        sys.stdout.write(f"{args.npz}\n")


def drawing_of(opened: Run, args: argparse.Namespace) -> tuple[Draw, Mapping[str, Any]]:
    """Return what draws a run's images by their numbers, and the settings that decide about them.

    Args:
        opened: the run.
        args: the options of `megavis sample`.

    Raises:
        UserError: the run draws no images from nothing.
    """
    from megavis.commands import sample_latents
    from megavis.objectives.base import PatchByPatch, TokenByToken
    from megavis.objectives.real_tokens import OneByOne, ReadsImages, Uncovers

    objective = opened.objective
    if isinstance(objective, OneByOne | Uncovers) and not isinstance(objective, ReadsImages):
        return sample_latents.drawing(opened, args)
    choice: dict[str, Any]
    if isinstance(objective, TokenByToken):
        choice = choice_of_ids(args)
        return _draw_ids(opened, args.seed, choice), choice
    if isinstance(objective, PatchByPatch):
        objective.check_drawing()
        choice = {"num_steps": args.sampling_steps, "temperature": args.temperature}
        return _draw_patches(opened, objective, args.seed, choice), choice
    raise UserError(f"runs of {opened.config.objective.name} draw no images from nothing")


def choice_of_ids(args: argparse.Namespace) -> dict[str, Any]:
    """Return how ids are chosen, as `generate` takes it."""
    temperature = 1.0 if args.temperature is None else args.temperature
    return {"temperature": temperature, "top_k": args.top_k, "top_p": args.top_p}


def _draw_ids(opened: Run, seed: int, choice: Mapping[str, Any]) -> Draw:
    import torch

    from megavis.sampling.autoregressive import generate
    from megavis.sampling.pictures import to_pixels

    objective: Any = opened.objective
    palette = opened.palette

    def draw(numbers: Tensor) -> Tensor:
        first, count = int(numbers[0]), len(numbers)
        ids = generate(
            opened.runner, objective, batch_size=count, first_image=first, seed=seed, **choice
        )
        return torch.from_numpy(to_pixels(objective.to_raster(ids), palette))

    return draw


def _draw_patches(
    opened: Run, objective: PatchByPatch, seed: int, choice: Mapping[str, Any]
) -> Draw:
    from megavis.model.orders import to_raster
    from megavis.sampling.patchwise import generate_patches

    def draw(numbers: Tensor) -> Tensor:
        numbers = numbers.to(opened.context.device)
        order = objective.orders(numbers)
        patches = generate_patches(
            opened.runner,
            objective,
            order=order,
            prefix=None,
            numbers=numbers,
            seed=seed,
            **choice,
        )
        return objective.images_of(to_raster(patches, order))

    return draw
