"""GIVT's distributions against torch.distributions, released values and extreme inputs."""

import pytest
import torch
from golden_givt import golden
from torch import distributions

from megavis.model.gaussian_mixture import FullGaussian, Mixture, ScaleForm

pytestmark = pytest.mark.once

LARGEST = torch.finfo(torch.float32).max


def draw(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 2.0


def reference_mixture(outputs, k, scale):
    """Return the head's outputs as a torch.distributions mixture in float64."""
    wide = outputs.double()
    parts = wide[..., k:].unflatten(-1, (k, 2, -1))
    components = distributions.Normal(parts[..., 0, :], scale(parts[..., 1, :]))
    return distributions.MixtureSameFamily(
        distributions.Categorical(logits=wide[..., :k]), distributions.Independent(components, 1)
    )


SCALES = {
    "squareplus": lambda x: ((x + (x.square() + 4).sqrt()) / 2).clamp(min=1e-6),
    "softplus": lambda x: torch.nn.functional.softplus(x).clamp(min=1e-6),
}


@pytest.mark.parametrize("activation", ["squareplus", "softplus"])
@pytest.mark.parametrize(("k", "d"), [(1, 4), (3, 8), (32, 32)])
def test_mixture_matches_torch_distributions(activation, k, d):
    outputs, tokens = draw(5, 7, k + 2 * k * d), draw(5, 7, d, seed=1)
    mixture = Mixture.from_outputs(outputs, k, ScaleForm(activation))
    reference = reference_mixture(outputs, k, SCALES[activation])
    expected = reference.log_prob(tokens.double()).float()
    torch.testing.assert_close(mixture.log_prob(tokens), expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(mixture.mean, reference.mean.float(), rtol=1e-5, atol=1e-5)


def test_full_gaussian_matches_torch_distributions():
    outputs, tokens = draw(5, 7, 20), draw(5, 7, 4, seed=1)
    factor = SCALES["squareplus"](outputs[..., :16].double()).unflatten(-1, (4, 4)).tril()
    reference = distributions.MultivariateNormal(outputs[..., 16:].double(), scale_tril=factor)
    ours = FullGaussian.from_outputs(outputs, ScaleForm()).log_prob(tokens)
    expected = reference.log_prob(tokens.double()).float()
    torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("name", "k"), [("causal", 3), ("maskgit", 3), ("encoder_decoder", 1), ("full_covariance", 0)]
)
def test_likelihoods_match_released_values(name, k):
    values = golden(f"givt_{name}")
    outputs, tokens = torch.tensor(values["logits"]), torch.tensor(values["tokens"])
    if k:
        found = Mixture.from_outputs(outputs, k, ScaleForm())
    else:
        found = FullGaussian.from_outputs(outputs, ScaleForm())
    expected = torch.tensor(values["nll"])
    torch.testing.assert_close(-found.log_prob(tokens), expected, rtol=0, atol=1e-3)


def extreme_values(count):
    values = torch.tensor([0.0, 1.0, -1.0, 1e-30, 1e4, -1e4, 1e20, -1e20, LARGEST, -LARGEST])
    choice = torch.randint(len(values), (count,), generator=torch.Generator().manual_seed(0))
    return values[choice]


@pytest.mark.parametrize("activation", ["squareplus", "softplus"])
def test_mixture_is_finite_for_every_finite_input(activation):
    outputs = extreme_values(2000 * 36).view(2000, 36).requires_grad_()
    tokens = extreme_values(2000 * 4).flip(0).view(2000, 4)
    nll = -Mixture.from_outputs(outputs, 4, ScaleForm(activation)).log_prob(tokens)
    assert nll.isfinite().all()
    nll.mean().backward()
    assert outputs.grad is not None
    assert outputs.grad.isfinite().all()


def test_full_gaussian_is_finite_for_every_finite_input():
    outputs, tokens = extreme_values(2000 * 20).view(2000, 20), extreme_values(8000).view(2000, 4)
    assert FullGaussian.from_outputs(outputs, ScaleForm()).log_prob(tokens).isfinite().all()


def test_squareplus_is_accurate_for_large_negative_inputs():
    raw = torch.tensor([-1e5, -300.0, 0.0, 300.0], requires_grad=True)
    scale = ScaleForm(floor=1e-12).log_scale(raw).exp()
    wide = raw.detach().double()
    expected = ((wide + (wide.square() + 4).sqrt()) / 2).float()
    torch.testing.assert_close(scale, expected, rtol=1e-5, atol=0)
    scale.sum().backward()
    assert raw.grad is not None
    slope = 0.5 + 0.5 * wide / (wide.square() + 4).sqrt()
    torch.testing.assert_close(raw.grad, slope.float(), rtol=1e-4, atol=1e-9)


def test_scale_is_bounded_by_the_floor():
    for activation, floor in (("squareplus", 1e-6), ("softplus", 1e-5)):
        log_scale = ScaleForm(activation, floor).log_scale(torch.tensor([-1e9]))
        assert float(log_scale.exp()) == pytest.approx(floor, rel=1e-5)


def test_half_precision_outputs_are_scored_in_float32():
    outputs, tokens = draw(4, 36).bfloat16(), draw(4, 4, seed=1)
    half = Mixture.from_outputs(outputs, 4, ScaleForm()).log_prob(tokens)
    assert half.dtype == torch.float32
    assert torch.equal(half, Mixture.from_outputs(outputs.float(), 4, ScaleForm()).log_prob(tokens))


@pytest.mark.parametrize("scale", [1.0, 0.5])
def test_draws_have_the_moments_of_the_tempered_mixture(scale):
    logits = torch.tensor([0.2, -1.0, 1.5]).log_softmax(0)
    means, scales = draw(3, 2), draw(3, 2, seed=2).abs() + 0.1
    mixture = Mixture(logits, means, scales.log()).tempered(scale=scale)
    generator = torch.Generator().manual_seed(3)
    count = 200_000
    many = Mixture(*(t.expand(count, *t.shape) for t in (logits, means, mixture.log_scales)))
    draws = many.draw(
        torch.rand(count, generator=generator), torch.randn(count, 2, generator=generator)
    )
    weights = logits.exp()[:, None]
    mean = (weights * means).sum(0)
    variance = (weights * ((scale * scales) ** 2 + means**2)).sum(0) - mean**2
    torch.testing.assert_close(draws.mean(0), mean, rtol=0.02, atol=0.02)
    torch.testing.assert_close(draws.var(0), variance, rtol=0.02, atol=0.02)


@pytest.mark.parametrize("scale", [1.0, 0.5])
def test_full_gaussian_draws_have_the_right_covariance(scale):
    gaussian = FullGaussian.from_outputs(draw(12), ScaleForm())
    normals = torch.randn(200_000, 3, generator=torch.Generator().manual_seed(0))
    draws = gaussian.tempered(scale=scale).draw(torch.zeros(200_000), normals)
    covariance = scale**2 * gaussian.factor @ gaussian.factor.t()
    torch.testing.assert_close(draws.t().cov(), covariance, rtol=0.03, atol=0.05)
