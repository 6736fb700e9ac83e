"""Figure of images completed group by group, each group predicted from those before it.

A random share of the tokens is given. With one group all others are predicted at once, as in masked
modelling.

Legend: b images, n tokens of an image, h and w height and width in pixels.
"""

from __future__ import annotations

import argparse
from dataclasses import fields

import torch
from torch import Tensor

from megavis.composition.model import generator_of
from megavis.composition.tokens import Vectors
from megavis.composition.trainable import Trainable
from megavis.config.errors import UserError
from megavis.data.loading.loader import read_round_robin
from megavis.evaluation.figures import FigureInput, RenderedFigure
from megavis.evaluation.images.pair_metrics import score_filling
from megavis.evaluation.images.results import FilledInGroups, FillingScores
from megavis.model.autoencoder_losses import open_perceptual
from megavis.parallel.random import derive_seed
from megavis.sampling.pictures import completion_grid, pixels_of
from megavis.sampling.sampler import Sampler
from megavis.schedules.orders import gather_tokens, random_orders

_BATCH_SIZE = 64


def fill(
    sampler: Sampler, originals: Tensor, images: Tensor, *, num_given: int, num_orders: int = 1
) -> tuple[Tensor, Tensor]:
    """Give some tokens of each image and predict the others, group by group.

    Errors of earlier groups propagate to later ones and depend on the order; averaging over several
    orders reduces them.

    Args:
        sampler: sampler with the option `groups`.
        originals: samples in the form of the shards.
        images: int64 `[b]`, indices of the images, which with the seed determine the given tokens.
        num_given: number of given tokens, the same ones for any number of groups.
        num_orders: average the predictions over this many orders; above 1 only for real-valued
            tokens.

    Returns:
        Images uint8 `[b, h, w, 3]`, whose given pixels are exact if tokens are patches, and the
        mask of the given tokens, bool `[b, n]` in raster order.

    Raises:
        UserError: the model cannot start from given tokens, there are fewer tokens than groups, or
            ids cannot be averaged.
    """
    model, order = sampler.model, sampler.order_of(images)
    if num_orders > 1 and not isinstance(model.predicts, Vectors):
        raise UserError("ids cannot be averaged over several orders: leave out --orders")
    tokens = model.given(model.tokens_of(originals.to(sampler.device)))
    given = sampler.given_part_of(order, num_given)
    total: Tensor | None = None
    for number in range(num_orders):
        drawn = sampler.tokens(
            images, order=order, given=gather_tokens(tokens, order[:, :num_given])
        )
        raster = sampler.from_order(drawn, order)
        total = raster if total is None else total + raster
        seed = derive_seed(sampler.seed, "fill", number)
        rest = order[:, num_given:]
        shuffled = gather_tokens(rest, random_orders(images, rest.shape[1], seed=seed))
        order = torch.cat([order[:, :num_given], shuffled], dim=1)
    assert total is not None
    return sampler.to_images(total / num_orders if num_orders > 1 else total), given


def applies(objective: Trainable) -> bool:
    """Return whether the model generates in groups."""
    schedule = generator_of(objective).schedule
    return "groups" in {field.name for field in fields(schedule.options_type)}


def plot_groups(subject: FigureInput, options: argparse.Namespace) -> RenderedFigure:
    """Complete images in each number of groups, score them, and draw the first eight."""
    perceptual = open_perceptual(options.perceptual_weights, options.lpips_weights)
    inputs = read_round_robin(subject.images, options.num_images).inputs
    inputs = inputs.to(subject.inference.context.device)
    model = generator_of(subject.objective)
    originals = model.to_images(model.tokens_of(inputs), subject.folder)
    rows, columns, given = [], [], None
    for count in options.groups:
        images, shown = _fill_all(subject, options, inputs, num_groups=count)
        given = pixels_of(shown, model.predicts.grid, originals.cpu().numpy())
        hidden = ~torch.from_numpy(given).to(originals.device)
        scores = score_filling(originals, images, hidden, perceptual=perceptual)
        rows.append(FilledInGroups(count, FillingScores(**scores)).record())
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
    """Complete all images; return them, uint8 `[b, h, w, 3]`, and the mask of given tokens."""
    sampler = Sampler(
        subject.inference,
        subject.objective,
        subject.folder,
        {"groups": num_groups},
        seed=options.seed,
    )
    num_given = round(options.share * sampler.model.num_tokens)
    numbers = torch.arange(len(inputs), device=inputs.device)
    # With a single group the order does not matter.
    num_orders = options.orders if num_groups > 1 else 1
    parts = [
        fill(sampler, inputs[each], each, num_given=num_given, num_orders=num_orders)
        for each in numbers.split(_BATCH_SIZE)
    ]
    images, given = (torch.cat(each) for each in zip(*parts, strict=True))
    return images, given
