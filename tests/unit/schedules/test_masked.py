"""MaskGIT's rounds against the schedule written out, what stays in them, and what is hidden."""

import math

import pytest
import torch

from megavis.config.errors import UserError
from megavis.schedules.masked import MaskedShare, RoundOptions, Rounds, lowest
from megavis.schedules.orders import Orders
from megavis.schedules.schedule import GenerationProgress

NUM_TOKENS = 16


@pytest.mark.parametrize(("rounds", "num_tokens"), [(16, 256), (16, 1024), (4, 3), (8, 16)])
def test_schedule_is_the_cosine_with_one_token_a_round(rounds, num_tokens):
    options = RoundOptions(rounds)
    hidden = num_tokens
    for step in range(rounds):
        wanted = math.floor(num_tokens * math.cos(math.pi / 2 * (step + 1) / rounds))
        hidden = max(0, min(hidden - 1, wanted))
        assert options.num_hidden(step, num_tokens) == hidden
    assert hidden == 0


def schedule(**options):
    return Rounds(Orders(torch.arange(NUM_TOKENS)), least_masking=0.0, seed=0, **options)


def hidden_by_step(temperature, rounds=4, seed=0):
    """What is hidden in each round where the likelihood of a token is its place."""
    options, images = RoundOptions(rounds, temperature), torch.tensor([5, 9])
    rule = schedule()
    step = rule.first(
        rule.order_of(images, options, seed=seed), num_images=2, num_given=0, options=options
    )
    found = []
    while step is not None:
        assert step.asked == slice(0, NUM_TOKENS)
        assert torch.equal(step.plan.groups > 0, step.hidden)
        found.append(step.hidden)
        score = torch.arange(float(NUM_TOKENS)).expand(2, NUM_TOKENS)
        step = rule.after(step, GenerationProgress(score, images, seed), options)
    return found, options


def test_the_likeliest_tokens_stay():
    found, options = hidden_by_step(temperature=0.0)
    assert len(found) == 4
    for step, hidden in enumerate(found):
        count = options.num_hidden(step - 1, NUM_TOKENS)
        assert (hidden == (torch.arange(NUM_TOKENS) < count)).all()


def test_known_tokens_are_never_hidden_again():
    found, _ = hidden_by_step(temperature=50.0)
    for before, after in zip(found, found[1:], strict=False):
        assert not (after & ~before).any()


def test_chance_follows_seed_and_image():
    first, again, other = (
        torch.stack(hidden_by_step(temperature=50.0, seed=seed)[0]) for seed in (0, 0, 1)
    )
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert not torch.equal(first[:, 0], first[:, 1])


def test_lowest_marks_the_lowest():
    confidence = torch.tensor([[3.0, float("inf"), -1.0, 0.5]])
    assert lowest(confidence, 2).tolist() == [[False, False, True, True]]


@pytest.mark.parametrize(("rounds", "temperature"), [(0, 1.0), (4, -1.0), (4, float("nan"))])
def test_values_out_of_range_are_refused(rounds, temperature):
    with pytest.raises(UserError, match="must be"):
        RoundOptions(rounds, temperature)


def test_a_share_is_hidden_in_any_order_of_the_tokens():
    order = torch.tensor([2, 0, 3, 1])
    plain, permuted = (
        MaskedShare(Orders(each), share=0.3, seed=4) for each in (torch.arange(4), order)
    )
    index = torch.arange(5000)
    hidden = plain.draw(index).groups
    assert hidden.float().mean() == pytest.approx(0.3, abs=0.01)
    assert torch.equal(permuted.draw(index).groups, hidden[:, order])
    assert plain.is_random
    features = plain.for_features(index)
    assert torch.equal(features.groups, hidden), "hidden for features too"
    rounds = Rounds(Orders(order), least_masking=0.3, seed=4)
    assert not rounds.for_features(index).groups.any()
