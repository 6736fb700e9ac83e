"""MaskGIT rounds: the cosine schedule, which tokens stay hidden, and the training mask."""

import math

import pytest
import torch

from megavis.config.errors import UserError
from megavis.schedules.hidden_share import HiddenShare
from megavis.schedules.masked import Masked, RoundOptions, Rounds, lowest
from megavis.schedules.orders import Orders
from megavis.schedules.schedule import GenerationProgress

NUM_TOKENS = 16


@pytest.mark.parametrize(("rounds", "num_tokens"), [(16, 256), (16, 1024), (4, 3), (8, 16)])
def test_cosine_schedule_reveals_at_least_one_token_per_round(rounds, num_tokens):
    options = RoundOptions(rounds)
    hidden = num_tokens
    for step in range(rounds):
        wanted = math.floor(num_tokens * math.cos(math.pi / 2 * (step + 1) / rounds))
        hidden = max(0, min(hidden - 1, wanted))
        assert options.num_hidden(step, num_tokens) == hidden
    assert hidden == 0


def schedule():
    share = HiddenShare(NUM_TOKENS, 0.0, None, 1)
    return Rounds(Orders(torch.arange(NUM_TOKENS)), share=share, loss_average="batch", seed=0)


def hidden_by_step(temperature, rounds=4, seed=0):
    """Return the hidden tokens of each round when a token's score is its position."""
    options, images = RoundOptions(rounds, temperature), torch.tensor([5, 9])
    rule = schedule()
    step = rule.first(
        rule.order_of(images, options, seed=seed), num_images=2, num_given=0, options=options
    )
    found = []
    while step is not None:
        assert step.asked == slice(0, NUM_TOKENS)
        assert torch.equal(step.arrangement.groups > 0, step.hidden)
        found.append(step.hidden)
        score = torch.arange(float(NUM_TOKENS)).expand(2, NUM_TOKENS)
        step = rule.after(step, GenerationProgress(score, images, seed), options)
    return found, options


def test_likeliest_tokens_are_kept():
    found, options = hidden_by_step(temperature=0.0)
    assert len(found) == 4
    for step, hidden in enumerate(found):
        count = options.num_hidden(step - 1, NUM_TOKENS)
        assert (hidden == (torch.arange(NUM_TOKENS) < count)).all()


def test_known_tokens_are_never_hidden_again():
    found, _ = hidden_by_step(temperature=50.0)
    for before, after in zip(found, found[1:], strict=False):
        assert not (after & ~before).any()


def test_hidden_tokens_depend_on_seed_and_image():
    first, again, other = (
        torch.stack(hidden_by_step(temperature=50.0, seed=seed)[0]) for seed in (0, 0, 1)
    )
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert not torch.equal(first[:, 0], first[:, 1])


def test_lowest_marks_the_smallest_values():
    confidence = torch.tensor([[3.0, float("inf"), -1.0, 0.5]])
    assert lowest(confidence, 2).tolist() == [[False, False, True, True]]


@pytest.mark.parametrize(("rounds", "temperature"), [(0, 1.0), (4, -1.0), (4, float("nan"))])
def test_out_of_range_options_raise(rounds, temperature):
    with pytest.raises(UserError, match="must be"):
        RoundOptions(rounds, temperature)


def test_masked_share_is_independent_of_token_order():
    order = torch.tensor([2, 0, 3, 1])
    plain, permuted = (Masked(Orders(each), share=0.3, seed=4) for each in (torch.arange(4), order))
    index = torch.arange(5000)
    hidden = plain.draw(index).groups
    assert hidden.float().mean() == pytest.approx(0.3, abs=0.01)
    assert torch.equal(permuted.draw(index).groups, hidden[:, order])
    assert plain.is_random
    features = plain.for_features(index)
    assert torch.equal(features.groups, hidden), "features use the same mask"
    rounds = Rounds(Orders(order), share=HiddenShare(4, 0.3, None, 1), loss_average="batch", seed=4)
    assert not rounds.for_features(index).groups.any()
