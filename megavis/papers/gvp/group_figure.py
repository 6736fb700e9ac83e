"""Fill in images group by group: each group is predicted from those filled in before.

A random share of the tokens is given. One group is masked modelling's way: all at once.

Legend: b images, n tokens of an image.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from megavis.composition.trainable import Trainable
from megavis.data.loading.loader import read_round_robin
from megavis.evaluation.figures import FigureInput, RenderedFigure
from megavis.evaluation.images.completions import score_filling
from megavis.model.autoencoder_losses import open_perceptual
from megavis.parallel.random import derive_seed
from megavis.sampling.grids import completion_grid
from megavis.sampling.pictures import pixels_of
from megavis.sampling.sampler import Sampler
from megavis.schedules.orders import random_orders, take_places

_BATCH_SIZE = 64


@dataclass(frozen=True)
class Filled:
    """What became of images of which some tokens were given.

    Attributes:
        images: uint8 `[b, h, w, 3]`; given pixels are exact where tokens are patches.
        given: bool `[b, n]` in raster order.
    """

    images: Tensor
    given: Tensor


def fill(
    sampler: Sampler, originals: Tensor, images: Tensor, *, num_given: int, num_orders: int = 1
) -> Filled:
    """Give some tokens of each image and predict the others, group by group.

    What a later group is predicted from has errors, which depend on the order; the mean over
    several orders has less of them.

    Args:
        sampler: with the number of groups among its options.
        originals: what shards hold.
        images: int64 `[b]`, numbers of the images, which with the seed decide what is known.
        num_given: tokens that are given; the same ones whatever the number of groups.
        num_orders: the predictions are the mean over so many orders of the others; more than one
            needs tokens that are numbers.

    Raises:
        UserError: the paper does not generate so, or there are fewer tokens than groups.
    """
    paper, order = sampler.paper, sampler.order_of(images)
    tokens = paper.tokens_of(originals.to(sampler.device))
    given = sampler.given_part_of(order, num_given)
    total: Tensor | None = None
    for number in range(num_orders):
        drawn = sampler.tokens(images, order=order, given=take_places(tokens, order[:, :num_given]))
        raster = sampler.from_order(drawn, order)
        total = raster if total is None else total + raster
        order = _shuffle_rest(order, num_given, seed=derive_seed(sampler.seed, "fill", number))
    assert total is not None
    return Filled(sampler.to_images(total / num_orders if num_orders > 1 else total), given)


def _shuffle_rest(order: Tensor, num_given: int, *, seed: int) -> Tensor:
    """Return another order `[b, n]` that begins with the same places."""
    rest = order[:, num_given:]
    index = torch.arange(len(order), device=order.device)
    shuffled = take_places(rest, random_orders(index, rest.shape[1], seed=seed))
    return torch.cat([order[:, :num_given], shuffled], dim=1)


def applies(objective: Trainable) -> bool:
    """Return whether generation takes a number of groups."""
    schedule = objective.generation().schedule
    return "groups" in {field.name for field in fields(schedule.options_type)}


def draw_groups(subject: FigureInput, options: argparse.Namespace) -> RenderedFigure:
    """Predict in each number of groups, compare, and draw the first eight images."""
    perceptual = open_perceptual(options.perceptual_weights, options.lpips_weights)
    inputs = read_round_robin(subject.images, options.num_images).inputs
    inputs = inputs.to(subject.runner.context.device)
    paper = subject.objective.generation()
    originals = paper.to_images(paper.tokens_of(inputs), subject.folder)
    rows, columns, given = [], [], None
    for count in options.groups:
        images, shown = _fill_all(subject, options, inputs, num_groups=count)
        given = pixels_of(shown, originals.cpu().numpy())
        hidden = ~torch.from_numpy(given).to(originals.device)
        scores = score_filling(originals, images, hidden, perceptual=perceptual)
        rows.append({"groups": count, **scores})
        columns.append(images[:8].cpu().numpy())
    assert given is not None
    return RenderedFigure(
        completion_grid(originals[:8].cpu().numpy(), given[:8], columns),
        rows,
        [", ".join(f"{name} {value:.4g}" for name, value in row.items()) for row in rows],
    )


def _fill_all(
    subject: FigureInput, options: argparse.Namespace, inputs: Tensor, *, num_groups: int
) -> tuple[Tensor, Tensor]:
    """Fill in all images, uint8 `[b, h, w, 3]`; returns also which tokens were given."""
    sampler = Sampler(
        subject.runner,
        subject.objective,
        subject.folder,
        {"groups": num_groups},
        seed=options.seed,
    )
    num_given = round(options.share * sampler.paper.num_tokens)
    numbers = torch.arange(len(inputs), device=inputs.device)
    # All at once no order is left to average over.
    num_orders = options.orders if num_groups > 1 else 1
    parts = [
        fill(sampler, inputs[each], each, num_given=num_given, num_orders=num_orders)
        for each in numbers.split(_BATCH_SIZE)
    ]
    return torch.cat([part.images for part in parts]), torch.cat([part.given for part in parts])
