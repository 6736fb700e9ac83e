"""MaskGIT's rounds against the schedule written out, and what stays in them."""

import math

import pytest
import torch

from megavis.config.errors import UserError
from megavis.sampling.maskgit import MaskGITSchedule, lowest, uncover


@pytest.mark.parametrize(("num_steps", "num_tokens"), [(16, 256), (16, 1024), (4, 3), (8, 16)])
def test_schedule_is_the_cosine_with_one_token_a_round(num_steps, num_tokens):
    schedule = MaskGITSchedule(num_steps)
    hidden = num_tokens
    for step in range(num_steps):
        wanted = math.floor(num_tokens * math.cos(math.pi / 2 * (step + 1) / num_steps))
        hidden = max(0, min(hidden - 1, wanted))
        assert schedule.num_hidden(step, num_tokens) == hidden
    assert hidden == 0


def run(temperature, num_steps=4, seed=0):
    """A model whose likelihood is the number of the place, and whose draws say the round."""
    seen = []

    def propose(tokens, hidden, step):
        seen.append((tokens.clone(), hidden.clone()))
        likelihood = torch.arange(16.0).expand(2, 16)
        return torch.full((2, 16, 3), float(step + 1)), likelihood

    schedule = MaskGITSchedule(num_steps, temperature)
    images = torch.tensor([5, 9])
    tokens = uncover(propose, images, num_tokens=16, token_size=3, schedule=schedule, seed=seed)
    return tokens, seen, schedule


def test_the_likeliest_tokens_stay():
    tokens, seen, schedule = run(temperature=0.0)
    for step, (given, hidden) in enumerate(seen):
        count = schedule.num_hidden(step - 1, 16)
        assert (hidden == (torch.arange(16) < count)).all()
        assert (given[hidden] == 0).all()
    # The round in which each token was uncovered.
    rounds = [min(s + 1 for s in range(4) if schedule.num_hidden(s, 16) <= i) for i in range(16)]
    assert tokens[0, :, 0].tolist() == rounds


def test_known_tokens_are_never_drawn_again():
    _, seen, _ = run(temperature=50.0)
    for (before, hidden), (after, _) in zip(seen, seen[1:], strict=False):
        assert torch.equal(before[~hidden], after[~hidden])


def test_chance_follows_seed_and_image():
    first, _, _ = run(temperature=50.0)
    again, _, _ = run(temperature=50.0)
    other, _, _ = run(temperature=50.0, seed=1)
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert not torch.equal(first[0], first[1])


def test_lowest_marks_the_lowest():
    confidence = torch.tensor([[3.0, float("inf"), -1.0, 0.5]])
    assert lowest(confidence, 2).tolist() == [[False, False, True, True]]


@pytest.mark.parametrize(("steps", "temperature"), [(0, 1.0), (4, -1.0), (4, float("nan"))])
def test_values_out_of_range_are_refused(steps, temperature):
    with pytest.raises(UserError, match="must be"):
        MaskGITSchedule(steps, temperature)
