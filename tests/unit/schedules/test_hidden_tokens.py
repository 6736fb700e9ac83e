"""Shapes of masks against BEiT's algorithm 1 as a loop, and against what a grid shows."""

import math

import pytest
import torch

from megavis.config.errors import UserError
from megavis.parallel.random import uniform
from megavis.schedules.hidden_tokens import HiddenTokens
from megavis.schedules.masked import Context

pytestmark = pytest.mark.once


def hidden_by_beit(draws, order, height, width, count):
    """Algorithm 1 of BEiT; the last block is cut in raster order, so that `count` are hidden.

    Where 32 blocks hide too few tokens, the first ones of a random order are added.
    """
    masked, turn = {}, 0  # A dict keeps the order in which cells were added.
    while len(masked) < count and turn < 32:
        first, second, third, fourth = draws[4 * turn : 4 * turn + 4]
        turn += 1
        left = count - len(masked)
        least = min(round(16 / 196 * height * width), left)
        size = least + first * (left - least)
        # "Random between 0.3 and 1 / 0.3": log-uniform in the released code.
        aspect = math.exp(math.log(0.3) + second * (math.log(1 / 0.3) - math.log(0.3)))
        tall = min(height, round(math.sqrt(size * aspect)))
        wide = min(width, round(math.sqrt(size / aspect)))
        top = math.floor(third * (height - tall + 1))
        start = math.floor(fourth * (width - wide + 1))
        for row in range(top, top + tall):
            for column in range(start, start + wide):
                masked[row, column] = None
    is_whole = len(masked) >= count
    masked |= dict.fromkeys(divmod(cell, width) for cell in order)
    return set([*masked][:count]), is_whole


@pytest.mark.parametrize(("side", "count"), [(14, 75), (14, 147), (8, 32), (4, 8)])
def test_blocks_are_those_of_beit(side, count):
    index = torch.arange(300)
    ranks = HiddenTokens("blocks", (side, side), count).ranks(index, seed=3)
    draws = uniform(index, 128, seed=3, purpose="mask-blocks").double().tolist()
    orders = uniform(index, side**2, seed=3, purpose="mask").argsort(1).tolist()
    whole = 0
    for sample in index.tolist():
        expected, is_whole = hidden_by_beit(draws[sample], orders[sample], side, side, count)
        found = (ranks[sample] < count).nonzero().flatten().tolist()
        places = {divmod(each, side) for each in found}
        assert places == expected
        assert len(places) == count
        whole += is_whole
    assert whole > 0.95 * len(index)


@pytest.mark.parametrize("shape", ["tokens", "blocks", "grid"])
def test_ranks_are_permutations_and_functions_of_the_sample(shape):
    hidden = HiddenTokens(shape, (4, 6), 18)
    ranks = hidden.ranks(torch.arange(40), seed=1)
    assert torch.equal(ranks.sort(1).values, torch.arange(24).expand(40, -1))
    assert torch.equal(hidden.ranks(torch.arange(7, 20), seed=1), ranks[7:20])
    assert len(ranks.unique(dim=0)) > (3 if shape == "grid" else 35)
    assert not torch.equal(hidden.ranks(torch.arange(40), seed=2), ranks)


def test_a_grid_shows_one_place_of_each_square():
    hidden = HiddenTokens("grid", (4, 6), 18)
    shown = (hidden.ranks(torch.arange(4000), seed=0) >= 18).view(-1, 4, 6)
    places = [shown[:, row::2, column::2] for row in range(2) for column in range(2)]
    images = [place.flatten(1).all(1) for place in places]
    assert (torch.stack(images).sum(0) == 1).all()
    assert (shown.sum((1, 2)) == 6).all()
    for chosen in images:  # within five standard deviations of a quarter
        assert abs(int(chosen.sum()) - 1000) < 5 * (4000 * 3 / 16) ** 0.5


@pytest.mark.parametrize("shape", ["blocks", "grid"])
def test_a_context_holds_the_tokens_that_are_not_hidden(shape):
    hidden, index = HiddenTokens(shape, (4, 4), 12), torch.arange(9)
    rule = Context(16, mask_ratio=0.75, hidden=hidden, asks_context=False, seed=5)
    arrangement = rule.draw(index)
    assert (arrangement.num_content, arrangement.first_asked) == (4, 4)
    shown = hidden.ranks(index, seed=5) >= 12
    for order, expected in zip(arrangement.order.tolist(), shown, strict=True):
        assert sorted(order[:4]) == expected.nonzero().flatten().tolist()
    features = rule.for_features(index)
    assert (features.num_content, features.order[0].tolist()) == (16, list(range(16)))


def test_a_grid_has_no_other_share():
    rule = Context(16, mask_ratio=0.75, hidden=HiddenTokens("grid", (4, 4), 12), seed=5)
    with pytest.raises(UserError, match="grid hides three quarters"):
        rule.draw(torch.arange(2), 0.5)
