"""Rounds by order: which tokens a round predicts, and how many are hidden in training."""

import math

import pytest
import torch
from scipy import stats

from megavis.config.errors import UserError
from megavis.grammar.words import Rounds as RoundsWord
from megavis.schedules.hidden_share import HiddenShare
from megavis.schedules.ordered_rounds import OrderedRoundOptions, OrderedRounds
from megavis.schedules.schedule import GenerationProgress

NUM_TOKENS = 16


def share(count=NUM_TOKENS, least=0.7, deviation=0.25):
    word = RoundsWord(least_masking=least, masking_deviation=deviation)
    return HiddenShare(count, least, deviation, count - word.shown(count)[1])


def schedule(seed=0, **options):
    drawn = share(**options)
    shown = drawn.num_tokens - drawn.fewest
    return OrderedRounds(drawn, most_shown=shown, loss_average="images", seed=seed)


@pytest.mark.parametrize(("least", "deviation"), [(0.7, 0.25), (0.0, 0.5), (0.55, 0.1)])
def test_hidden_shares_are_those_of_a_truncated_normal(least, deviation):
    drawn = share(least=least, deviation=deviation)
    known = stats.truncnorm((least - 1.0) / deviation, 0, loc=1.0, scale=deviation)
    draws = torch.arange(0, 2**24, 2**10).float() * 2.0**-24
    shares = torch.from_numpy(known.ppf(draws.double().numpy()))
    expected = (NUM_TOKENS * shares - 1e-9).ceil().clamp(min=1)
    found = drawn.count(draws)
    # Rounding up, a share next to a multiple of 1/16 may go either way.
    assert (found - expected).abs().max() <= 1
    assert (found != expected).float().mean() < 1e-3
    assert drawn.mean == pytest.approx(found.mean().item(), abs=0.01)


@pytest.mark.parametrize("count", [4, 16, 20, 256, 1024])
@pytest.mark.parametrize("deviation", [None, 0.25])
@pytest.mark.parametrize("least", [0.0, 0.3, 0.55, 0.7, 0.99])
def test_no_image_shows_more_tokens_than_there_are_rows(count, deviation, least):
    word = RoundsWord(least_masking=least, masking_deviation=deviation)
    fewest, most = word.shown(count)
    ends = torch.tensor([0.0, 2.0**-24, 0.5, 1.0 - 2.0**-24])
    hidden = share(count, least, deviation).count(ends)
    assert fewest == 0
    assert (hidden >= count - most).all()
    assert (hidden <= count).all()
    assert hidden.min() == count - most


def test_training_hides_the_end_of_an_order_of_each_image():
    rule = schedule()
    index = torch.arange(400)
    drawn = rule.draw(index)
    assert torch.equal(drawn.order.sort(dim=1).values, torch.arange(16).expand(400, -1))
    hidden = drawn.groups.sum(1)
    assert torch.equal(hidden.float(), rule.num_predicted(index))
    assert (drawn.groups.diff(dim=1) >= 0).all()
    assert set(hidden.tolist()) == {12, 13, 14, 15, 16}
    assert drawn.num_content == 4
    assert hidden.float().mean() == pytest.approx(rule.expected_predicted, abs=0.2)
    again, other = rule.draw(index), schedule(seed=1).draw(index)
    assert torch.equal(again.order, drawn.order)
    assert torch.equal(again.groups, drawn.groups)
    assert not torch.equal(other.order, drawn.order)
    assert not rule.for_features(index).groups.any()


def steps_of(rounds, given=0, count=NUM_TOKENS):
    options, images = OrderedRoundOptions(rounds), torch.tensor([5, 9])
    rule = schedule(count=count)
    order = rule.order_of(images, seed=3)
    assert not torch.equal(order[0], order[1])
    step = rule.first(order, num_given=given, options=options)
    while step is not None:
        assert torch.equal(step.arrangement.order, order)
        hidden = torch.arange(count) >= step.known
        assert torch.equal(step.arrangement.groups > 0, hidden.expand(2, -1))
        yield step
        step = rule.after(step, GenerationProgress(None, images, 3), options)


def released_steps(count, rounds):
    """Return the end of each round's tokens by the equations of the released code.

    And the share known, by which its guidance grows.
    """
    masked, ends, shares = count, [], []
    for step in range(rounds):
        left = math.floor(count * math.cos(math.pi / 2 * (step + 1) / rounds))
        left = max(1, min(masked - 1, left))
        masked = 0 if step == rounds - 1 else left
        ends.append(count - masked)
        shares.append((count - left) / count)
    return ends, shares


@pytest.mark.parametrize(("count", "rounds"), [(16, 4), (256, 64), (256, 256), (16, 16), (16, 1)])
def test_rounds_are_those_of_the_released_code(count, rounds):
    steps = list(steps_of(rounds, count=count))
    rule, options = schedule(count=count), OrderedRoundOptions(rounds)
    shares = [rule.share_known(step, options) for step in steps]
    assert ([step.asked.stop for step in steps], shares) == released_steps(count, rounds)
    assert [step.known for step in steps] == [0, *(step.asked.stop for step in steps[:-1])]
    assert all(step.asked.start == step.known for step in steps)


def test_given_tokens_are_the_first_of_the_order():
    steps = list(steps_of(3, given=10))
    assert steps[0].known == 10
    # The other six are predicted as if there were no more.
    assert [step.asked.stop - 10 for step in steps] == released_steps(6, 3)[0]
    assert len(list(steps_of(3, given=16))) == 0
    with pytest.raises(UserError, match="rounds must be 1 or more"):
        OrderedRoundOptions(0)


def test_an_order_can_be_chosen():
    rule, index = schedule(), torch.tensor([2, 7])
    chosen = rule.chosen(index, {"order": torch.arange(16).flip(0)[None]}, is_named=True)
    assert torch.equal(chosen.order[1], torch.arange(16).flip(0))
    assert torch.equal(chosen.groups, rule.draw(index).groups)
    assert torch.equal(rule.chosen(index, {}, is_named=True).groups, chosen.groups)
    assert not rule.chosen(index, {}, is_named=False).groups.any()
    with pytest.raises(UserError, match="permutation"):
        rule.chosen(index, {"order": torch.zeros(1, 16).long()}, is_named=True)
