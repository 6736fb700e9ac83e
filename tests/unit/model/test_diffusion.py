"""Patch diffusion against SciPy, Bayes' rule and Gaussian data with a closed-form solution."""

import numpy as np
import pytest
import torch
from scipy import stats
from torch.distributions import Normal, kl_divergence

from megavis.densities.diffusion import (
    clean_from_noise,
    corrupt,
    posterior,
    reverse_process,
)
from megavis.densities.noise_levels import BetaNoise
from megavis.parallel.random import uniform

pytestmark = pytest.mark.once

CPU = torch.device("cpu")
SHAPES = [(0.03, 1.0), (1.0, 1.0), (0.1, 10.0), (3.0, 10.0), (10.0, 0.1), (0.1, 0.1)]


def draw(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize(("a", "b"), SHAPES)
def test_gammas_are_beta_distributed(a, b):
    draws = uniform(torch.arange(200), 100, seed=1, purpose="gamma").flatten()
    gamma = BetaNoise(a, b, CPU).from_uniform(draws)
    assert gamma.min() >= 0
    assert gamma.max() <= 1
    exact = stats.beta.ppf(draws.double().numpy() + 2.0**-25, a, b)
    np.testing.assert_allclose(gamma.numpy(), exact, atol=1e-4)
    places = np.concatenate([np.logspace(-6, -1, 20), np.linspace(0.1, 0.999, 20)])
    below = (gamma.double().numpy()[:, None] <= places).mean(0)
    np.testing.assert_allclose(below, stats.beta.cdf(places, a, b), atol=0.012)


def test_schedule_is_uniform_for_uniform_gamma_and_drops_empty_steps():
    torch.testing.assert_close(
        BetaNoise(1, 1, CPU).schedule(4), torch.tensor([0, 0.25, 0.5, 0.75, 1]), atol=1e-6, rtol=0
    )
    steep = BetaNoise(0.03, 1, CPU).schedule(100)
    assert len(steep) < 50
    assert torch.all(steep.diff() > 0)
    assert (steep[0], steep[-1]) == (0, 1)


def test_times_run_from_clean_to_noise():
    times = BetaNoise(0.03, 1, CPU).times(torch.tensor([1.0, 0.75, 0.0]))
    assert times.tolist() == [0, 250, 1000]


def test_posterior_matches_bayes_rule():
    clean, noisy = draw(50, 3), draw(50, 3, seed=1)
    before = torch.linspace(0.02, 0.98, 50, dtype=torch.float64)[:, None]
    alpha = torch.linspace(0.95, 0.05, 50, dtype=torch.float64)[:, None]
    mean, variance = posterior(noisy, clean, before * alpha, before)
    # Product of q(x' | x⁰) = N(√γ' x⁰, 1 - γ') and q(x | x') = N(√α x', 1 - α).
    precision = 1 / (1 - before) + alpha / (1 - alpha)
    expected = before.sqrt() * clean / (1 - before) + alpha.sqrt() * noisy / (1 - alpha)
    torch.testing.assert_close(mean, expected / precision)
    torch.testing.assert_close(variance, 1 / precision)


def test_noise_prediction_gives_the_mean_of_equation_2():
    clean, noise = draw(20, 3), draw(20, 3, seed=1)
    before = torch.linspace(0.1, 0.9, 20, dtype=torch.float64)[:, None]
    alpha = torch.full_like(before, 0.8)
    gamma = before * alpha
    noisy = corrupt(clean, noise, gamma)
    torch.testing.assert_close(clean_from_noise(noisy, noise, gamma), clean)
    expected = noisy / alpha.sqrt() - (1 - alpha) / (alpha * (1 - gamma)).sqrt() * noise
    torch.testing.assert_close(posterior(noisy, clean, gamma, before)[0], expected)


def test_loss_weights_of_a_uniform_gamma():
    """The bound weights γ by ½ dγ / (1 - γ)²; L_SIMP under Beta(1, 1) weights all γ equally.

    Appendix E: each term is KL(q(x' | x, x⁰) || p(x' | x)), which equals half the difference in
    signal-to-noise ratio γ / (1 - γ) times the squared error.
    """
    steps = 1000
    gammas = torch.arange(1, steps, dtype=torch.float64)[:, None] / steps
    gamma, before = gammas[:-1], gammas[1:]
    noisy, clean, guess = (draw(len(gamma), 3, seed=seed) for seed in range(3))
    true, model = posterior(noisy, clean, gamma, before), posterior(noisy, guess, gamma, before)
    deviation = true[1].sqrt()
    divergence = kl_divergence(Normal(true[0], deviation), Normal(model[0], deviation)).sum(-1)
    weight = divergence / (clean - guess).square().sum(-1)
    exact = (before / (1 - before) - gamma / (1 - gamma)) / 2
    torch.testing.assert_close(weight, exact[:, 0])
    middle = (gamma + before)[:, 0] / 2
    inside = middle < 0.95
    density = weight * steps
    torch.testing.assert_close(
        density[inside], (0.5 / (1 - middle) ** 2)[inside], rtol=1e-3, atol=0
    )
    # Beta(1, 1) has density 1 everywhere.
    draws = BetaNoise(1, 1, CPU).quantile(middle.float())
    torch.testing.assert_close(draws.double(), middle, atol=1e-5, rtol=0)


def gain_of(gamma, deviation):
    """E[x⁰ | x] = mean + gain · (x - √γ mean) for data N(mean, deviation²)."""
    return gamma.sqrt() * deviation**2 / (gamma * deviation**2 + 1 - gamma)


def deviation_after(gammas, deviation, temperature=1.0):
    """Return the final standard deviation: each step is linear in x plus independent noise."""
    variance = torch.full_like(deviation, temperature**2)
    for gamma, before in zip(gammas, gammas[1:], strict=False):
        alpha = gamma / before
        slope = alpha.sqrt() * (1 - before) / (1 - gamma)
        slope = slope + before.sqrt() * (1 - alpha) / (1 - gamma) * gain_of(gamma, deviation)
        added = (1 - alpha) * (1 - before) / (1 - gamma)
        variance = slope**2 * variance + (temperature**2 * added if before < 1 else 0)
    return variance.sqrt()


@pytest.mark.parametrize("temperature", [1.0, 0.5, 0.0])
def test_reverse_process_of_gaussian_data_has_analytic_moments(temperature):
    mean, deviation = torch.tensor([1.5, -0.5, 0.0]), torch.tensor([0.3, 1.0, 2.0])
    generator = torch.Generator().manual_seed(0)
    gammas = BetaNoise(1, 1, CPU).schedule(300)
    drawn = reverse_process(
        lambda noisy, gamma: mean + gain_of(gamma, deviation) * (noisy - gamma.sqrt() * mean),
        lambda _: torch.randn(20_000, 3, generator=generator),
        gammas,
        temperature=temperature,
    )
    torch.testing.assert_close(drawn.mean(0), mean, atol=0.05, rtol=0)
    expected = deviation_after(gammas, deviation, temperature)
    torch.testing.assert_close(drawn.std(0), expected, rtol=0.02, atol=1e-6)


def test_many_steps_recover_the_data_deviation():
    deviation = torch.tensor([0.3, 1.0, 2.0], dtype=torch.float64)
    # Few steps give too small a deviation; it converges to the data's.
    many = torch.linspace(0, 1, 20_001, dtype=torch.float64)
    torch.testing.assert_close(deviation_after(many, deviation), deviation, rtol=2e-3, atol=0)


def test_one_step_at_zero_temperature_gives_the_mean():
    still = reverse_process(
        lambda noisy, gamma: torch.full_like(noisy, 0.7) + noisy,
        lambda _: draw(4, 3).float(),
        torch.tensor([0.0, 1.0]),
        temperature=0.0,
        tempers_start=BetaNoise.tempers_start,
    )
    torch.testing.assert_close(still, torch.full((4, 3), 0.7))
