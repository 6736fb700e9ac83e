"""Density-based guidance against the density of the paper's sampler, integrated numerically."""

import math
from operator import itemgetter

import pytest
import torch
from largest_tensor import LargestTensor
from torch.distributions import Normal

from megavis.densities import gaussians
from megavis.densities.gaussians import Guided, draw_guided


def guided(mean, scale, other_mean, other_scale, weight):
    values = (mean, math.log(scale), other_mean, math.log(other_scale))
    return Guided(*(torch.tensor([v]) for v in values), weight)


CASES = [(0.3, 0.5, 0.0, 1.0, 0.4), (-1.0, 1.0, 0.5, 1.2, 2.0), (0.0, 0.1, 3.0, 0.3, 0.8)]


# The vertex of a narrow density, between two of the points and closer to the higher one.
NARROW = (0.0, 0.02, -0.0963, 0.03, 0.4)


@pytest.mark.parametrize("case", [*CASES, NARROW])
def test_bound_is_the_maximum_over_the_papers_grid(case):
    density = guided(*case)
    points = density.mean + torch.linspace(-10, 10, 1001)
    highest = density.log_density(points).max()
    proposal = Normal(case[0], 2 * max(case[1], case[3])).log_prob(torch.tensor(case[0]))
    torch.testing.assert_close(density.log_bound()[0], highest - proposal, rtol=1e-4, atol=1e-4)


def test_bound_of_an_unbounded_density_is_at_the_grids_end():
    density = guided(0.0, 1.0, 0.5, 0.4, 2.0)
    points = torch.linspace(-10, 10, 1001)
    proposal = Normal(0.0, 2.0).log_prob(torch.tensor(0.0))
    highest = density.log_density(points).max() - proposal
    torch.testing.assert_close(density.log_bound()[0], highest, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("case", CASES)
def test_draws_follow_the_samplers_density(case):
    """The paper's bound holds only at the proposal's mode; elsewhere it truncates the density."""
    count, density = 40_000, guided(*case)
    many = Guided(*(t.expand(count) for t in _tensors(density)), density.weight)
    draws, counts = draw_guided(many, torch.arange(count), seed=0, purpose="test")
    mean, scale, other_mean, other_scale, weight = case
    grid = torch.linspace(mean - 8, mean + 8, 20_001, dtype=torch.float64)
    target = (1 + weight) * Normal(mean, scale).log_prob(grid)
    target = (target - weight * Normal(other_mean, other_scale).log_prob(grid)).exp()
    proposal = Normal(mean, 2 * max(scale, other_scale)).log_prob(grid).exp()
    reached = torch.minimum(target, proposal * density.log_bound().double().exp())
    reached = reached / reached.sum()
    expected = (reached * grid).sum()
    variance = (reached * (grid - expected) ** 2).sum()
    error = 4 * math.sqrt(float(variance) / count)
    assert float(draws.mean()) == pytest.approx(float(expected), abs=error)
    assert float(draws.var()) == pytest.approx(float(variance), rel=0.05)
    wanted, found, proposed = counts.tolist()
    assert wanted == count
    assert found > 0.999 * count
    assert 0.02 < found / proposed <= 1


def _tensors(density):
    return density.mean, density.log_scale, density.other_mean, density.other_log_scale


def test_zero_weight_draws_the_conditional_gaussian():
    count = 40_000
    columns = [torch.full((count,), v) for v in (1.0, math.log(0.5), 7.0, 0.0)]
    draws, counts = draw_guided(Guided(*columns, 0.0), torch.arange(count), seed=1, purpose="t")
    assert float(draws.mean()) == pytest.approx(1.0, abs=0.01)
    assert float(draws.std()) == pytest.approx(0.5, rel=0.02)
    # Proposals have four times the deviation, so a quarter of them is accepted.
    assert float(counts[1] / counts[2]) == pytest.approx(0.25, rel=0.02)


def test_rejected_draws_fall_back_to_the_conditional_gaussian():
    # The bound is attained at the grid's end, far above the density near the mean.
    count = 1000
    columns = [torch.full((count,), v) for v in (0.0, 0.0, 0.5, math.log(0.3))]
    draws, counts = draw_guided(Guided(*columns, 2.0), torch.arange(count), seed=0, purpose="t")
    assert counts[1] < 0.1 * count
    assert float(draws.std()) == pytest.approx(1.0, rel=0.15)


def test_draw_depends_only_on_its_key():
    density = guided(*CASES[0])
    many = Guided(*(t.expand(10) for t in _tensors(density)), density.weight)
    whole, _ = draw_guided(many, torch.arange(10), seed=3, purpose="t")
    some = many.map(itemgetter(torch.tensor([7, 2])))
    keys = torch.tensor([7, 2])
    again, _ = draw_guided(some, keys, seed=3, purpose="t")
    # A vector unit may round 2 values differently from 10.
    torch.testing.assert_close(whole[keys], again)


def test_gpu_draws_match_cpu_draws(monkeypatch):
    """The GPU path proposes for all values, the CPU path only for those not yet accepted."""
    count = 500
    one = guided(0.0, 0.1, 3.0, 0.3, 0.8)
    many = Guided(*(t.expand(count) for t in _tensors(one)), one.weight)
    wanted = draw_guided(many, torch.arange(count), seed=3, purpose="test")
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    found = draw_guided(many, torch.arange(count), seed=3, purpose="test")
    assert torch.equal(found[0], wanted[0])
    assert found[1].tolist() == wanted[1].tolist()
    # Some values need more than one round of proposals.
    assert wanted[1][2] > 16 * count / 10


def test_memory_of_gpu_draws_is_bounded(monkeypatch):
    count, at_once = 500, 64
    density = guided(*CASES[1])
    many = Guided(*(t.expand(count) for t in _tensors(density)), density.weight)
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    wanted = draw_guided(many, torch.arange(count), seed=3, purpose="test")
    monkeypatch.setattr(gaussians, "_VALUES_AT_ONCE", at_once)
    with LargestTensor() as largest:
        found = draw_guided(many, torch.arange(count), seed=3, purpose="test")
    assert 0 < largest.size <= at_once * 2 * 664 * 8
    assert torch.equal(found[0], wanted[0])
    assert torch.equal(found[1], wanted[1])
