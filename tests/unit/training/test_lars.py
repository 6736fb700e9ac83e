"""LARS against the paper's equation and timm, and SGD against torch."""

import math

import pytest
import torch
from timm_alone import timm_module

from megavis.config.schema import OptimizerConfig
from megavis.training import optimizer
from megavis.training.optimizer import build_optimizer

SETTINGS = {"learning_rate": 0.5, "betas": (0.9, 0.0), "algorithm": "lars"}


def parameters():
    generator = torch.Generator().manual_seed(0)
    matrix = torch.nn.Parameter(torch.randn(3, 4, generator=generator))
    bias = torch.nn.Parameter(torch.zeros(3))
    return {"head.classifier.linear.weight": matrix, "head.classifier.linear.bias": bias}


def gradients(step):
    generator = torch.Generator().manual_seed(1 + step)
    return [torch.randn(3, 4, generator=generator), torch.randn(3, generator=generator)]


def trained(named, optimizer, steps=4):
    for step in range(steps):
        for parameter, gradient in zip(named.values(), gradients(step), strict=True):
            parameter.grad = gradient
        optimizer.step()
    return [parameter.detach() for parameter in named.values()]


@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_steps_match_plain_arithmetic(decay):
    """Equation 6: v ← m v + γ λ (∇L + β w), with λ = η ‖w‖ / (‖∇L‖ + β ‖w‖)."""
    named = parameters()
    weight, bias = (p.detach().flatten().tolist() for p in named.values())
    optimizer = build_optimizer(named.values(), OptimizerConfig(**SETTINGS, weight_decay=decay))
    made = trained(named, optimizer)
    sums = [[0.0] * len(weight), [0.0] * len(bias)]
    for step in range(4):
        of_weight, of_bias = (g.flatten().tolist() for g in gradients(step))
        norms = [math.sqrt(sum(x * x for x in values)) for values in (weight, of_weight)]
        local = 0.001 * norms[0] / (norms[1] + decay * norms[0])
        for i, g in enumerate(of_weight):
            sums[0][i] = 0.9 * sums[0][i] + local * (g + decay * weight[i])
            weight[i] -= 0.5 * sums[0][i]
        for i, g in enumerate(of_bias):
            sums[1][i] = 0.9 * sums[1][i] + g
            bias[i] -= 0.5 * sums[1][i]
    torch.testing.assert_close(made[0].flatten(), torch.tensor(weight))
    torch.testing.assert_close(made[1], torch.tensor(bias))
    assert [group["step"] for group in optimizer.param_groups] == [4, 4]


def test_steps_match_timm():
    lars = timm_module("optim", "lars").Lars
    named, theirs = parameters(), parameters()
    made = trained(named, build_optimizer(named.values(), OptimizerConfig(**SETTINGS)))
    matrix, bias = theirs.values()
    groups = [{"params": [matrix], "always_adapt": True}, {"params": [bias]}]
    expected = trained(theirs, lars(groups, lr=0.5, momentum=0.9))
    torch.testing.assert_close(made, expected)


def test_zero_matrix_takes_an_unscaled_step():
    named = {"head.classifier.linear.weight": torch.nn.Parameter(torch.zeros(2, 2))}
    (parameter,) = named.values()
    parameter.grad = torch.ones(2, 2)
    build_optimizer(named.values(), OptimizerConfig(**SETTINGS)).step()
    torch.testing.assert_close(parameter.detach(), torch.full((2, 2), -0.5))


def test_non_finite_gradients_skip_the_step():
    named = parameters()
    optimizer = build_optimizer(named.values(), OptimizerConfig(**SETTINGS))
    before = [value.clone() for value in trained(named, optimizer)]
    next(iter(named.values())).grad.fill_(math.inf)
    optimizer.found_inf = torch.ones(())
    optimizer.step()
    torch.testing.assert_close([value.detach() for value in named.values()], before)
    assert all(state["momentum"].isfinite().all() for state in optimizer.state.values())


def test_frozen_parameters_are_excluded():
    named = parameters()
    named["blocks.0.weight"] = torch.nn.Parameter(torch.ones(2, 2), requires_grad=False)
    for algorithm, count in (("lars", 2), ("adam", 1)):
        config = OptimizerConfig(learning_rate=1.0, algorithm=algorithm)
        groups = build_optimizer(named.values(), config).param_groups
        assert len(groups) == count
        assert sum(len(group["params"]) for group in groups) == 2


@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_sgd_matches_torch(decay):
    """As in all optimizers here, only the matrix decays."""
    named, theirs = parameters(), parameters()
    settings = {**SETTINGS, "algorithm": "sgd", "weight_decay": decay}
    made = trained(named, build_optimizer(named.values(), OptimizerConfig(**settings)))
    matrix, bias = theirs.values()
    groups = [{"params": [matrix], "weight_decay": decay}, {"params": [bias]}]
    expected = trained(theirs, torch.optim.SGD(groups, lr=0.5, momentum=0.9))
    torch.testing.assert_close(made, expected)


def test_norms_are_summed_where_the_group_can(monkeypatch):
    """States offloaded to the host are summed on the GPU: its groups take no tensors of a CPU."""
    places = []
    monkeypatch.setattr(optimizer, "sum_over", lambda _, sums, place: places.append(place) or sums)
    named, gpu = parameters(), torch.device("cuda", 1)
    config = OptimizerConfig(**SETTINGS)
    trained(named, build_optimizer(named.values(), config, parts=object(), device=gpu), steps=1)
    assert places == [gpu]
