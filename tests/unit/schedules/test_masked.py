"""MaskGIT rounds: the cosine schedule, which tokens stay hidden, and the training mask."""

import math

import numpy as np
import pytest
import torch
from scipy import stats

from megavis.config.errors import UserError
from megavis.parallel.random import uniform
from megavis.schedules.hidden_share import HiddenShare
from megavis.schedules.hidden_tokens import HiddenTokens
from megavis.schedules.masked import Masked, RoundOptions, Rounds, lowest
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
    return Rounds(NUM_TOKENS, share=share, loss_average="batch", seed=0)


@pytest.mark.parametrize("least", [0.0, 0.3])
def test_the_hidden_share_is_a_cosine(least):
    """MaskGIT, section 3.1, and the mean over u of what is drawn."""
    share = HiddenShare(NUM_TOKENS, least, None, 1)
    rule, index = Rounds(NUM_TOKENS, share=share, loss_average="batch", seed=3), torch.arange(500)
    hidden = rule.draw(index).groups.sum(1)

    def count(u):
        return math.ceil(NUM_TOKENS * math.cos(math.pi / 2 * u * (1 - least)) - 1e-6)

    draws = uniform(index, 1, seed=3, purpose="masked-share")[:, 0].tolist()
    assert hidden.tolist() == [count(u) for u in draws]
    assert torch.equal(rule.num_predicted(index), hidden.float())
    mean = sum(count((i + 0.5) / 10_000) for i in range(10_000)) / 10_000
    assert rule.expected_predicted == pytest.approx(mean, abs=1e-3)


def hidden_by_step(temperature, rounds=4, seed=0):
    """Return the hidden tokens of each round when a token's score is its position."""
    options, images = RoundOptions(rounds, temperature), torch.tensor([5, 9])
    rule = schedule()
    step = rule.first(rule.order_of(images, seed=seed), num_given=0, options=options)
    found = []
    while step is not None:
        assert step.asked == slice(0, NUM_TOKENS)
        assert torch.equal(step.arrangement.groups > 0, step.hidden)
        found.append(step.hidden.expand(2, -1))
        score = torch.arange(float(NUM_TOKENS)).expand(2, NUM_TOKENS)
        step = rule.after(step, GenerationProgress(score, images, seed), options)
    return found, options


def test_likeliest_tokens_are_kept():
    found, options = hidden_by_step(temperature=0.0)
    assert len(found) == 4
    for step, hidden in enumerate(found):
        count = options.num_hidden(step - 1, NUM_TOKENS)
        assert (hidden == (torch.arange(NUM_TOKENS) < count)).all()


@pytest.mark.parametrize("rounds", [1, 5])
def test_the_choice_adds_noise_as_maskgit_does(rounds):
    """`mask_by_random_topk` of the released code: Gumbel noise, less of it in each round."""
    options, images, rule = RoundOptions(rounds, 3.0), torch.tensor([5, 9, 2]), schedule()
    scores = np.random.default_rng(0).normal(size=(rounds, 3, NUM_TOKENS)).astype(np.float32)
    step = rule.first(rule.order_of(images, seed=0), num_given=0, options=options)
    known = np.zeros((3, NUM_TOKENS), bool)
    for number, score in enumerate(scores):
        draws = uniform(images, NUM_TOKENS, seed=4, purpose=f"choice/{number}").double().numpy()
        noise = stats.gumbel_r.ppf(draws + 2.0**-25)
        confidence = score + 3.0 * (1.0 - (number + 1) / rounds) * noise
        confidence[known] = np.inf
        left = options.num_hidden(number, NUM_TOKENS)
        known = np.argsort(np.argsort(confidence)) >= left
        progress = GenerationProgress(torch.from_numpy(score), images, seed=4)
        step = rule.after(step, progress, options)
        if step is not None:
            assert np.array_equal(~step.hidden.numpy(), known)
            assert step.name == f"round/{number + 1}"
    assert step is None
    assert known.all()


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


def masked(**keys):
    return Masked(4, **{"share": 0.3, "masks_features": False, "seed": 4, **keys})


def test_each_token_is_masked_with_the_probability():
    hidden = masked().draw(torch.arange(5000)).groups
    assert hidden.float().mean() == pytest.approx(0.3, abs=0.01)
    assert masked().is_random


def test_every_subset_of_an_exact_number_is_equally_likely():
    rows = masked(hidden=HiddenTokens("tokens", (2, 2), 2)).draw(torch.arange(6000)).groups
    assert (rows.sum(1) == 2).all()
    found, counts = torch.unique(rows, dim=0, return_counts=True)
    assert len(found) == 6
    assert (counts - 1000).abs().max() < 5 * (6000 / 6 * 5 / 6) ** 0.5


def test_features_hide_nothing_unless_they_hide_as_in_training():
    index = torch.arange(9)
    assert not masked().for_features(index).groups.any()
    assert not masked().has_random_features
    drawn = masked(masks_features=True)
    assert drawn.has_random_features
    assert torch.equal(drawn.for_features(index).groups, drawn.draw(index).groups)
    rounds = Rounds(4, share=HiddenShare(4, 0.3, None, 1), loss_average="batch", seed=4)
    assert not rounds.for_features(index).groups.any()
