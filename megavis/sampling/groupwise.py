"""Fill in images group by group: each group is predicted from those filled in before.

A random share of the tokens is given. One group is masked modelling's way: all at once.

Legend: b images, n tokens of an image.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from megavis.model.orders import random_orders, take_places
from megavis.parallel.random import derive_seed
from megavis.sampling.sampler import Sampler


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
        images: int64 `[b]`, numbers of the images, which with the seed decide what is given.
        num_given: tokens that are given; the same ones whatever the number of groups.
        num_orders: the predictions are the mean over so many orders of the others; more than one
            wants tokens that are numbers.

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
