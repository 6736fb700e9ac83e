"""Learning-rate schedules, parameter groups, Apex, and the gradient norm of ZeRO-0."""

import math
import sys
import types

import pytest
import torch
from torch import nn

from megavis.checkpoint.state.parameter_states import AVERAGE
from megavis.config.errors import UserError
from megavis.config.schema import OptimizerConfig, ScheduleConfig
from megavis.model.parameters import ParamGroupOptions, add_options, set_decay
from megavis.training.optimizer import (
    GradientNorm,
    WeightAverage,
    build_optimizer,
    learning_rate,
    parameter_groups,
    split_groups,
)


def test_cosine_schedule_with_warmup():
    schedule = ScheduleConfig(warmup_steps=10, decay="cosine")
    rates = [learning_rate(s, peak=2.0, total_steps=110, config=schedule) for s in range(111)]
    assert rates[:10] == pytest.approx([2.0 * (s + 1) / 10 for s in range(10)])
    for s in range(10, 111):
        assert rates[s] == pytest.approx(1.0 + math.cos(math.pi * (s - 10) / 100))
    assert rates[10] == 2.0
    assert rates[110] == pytest.approx(0.0)


def test_linear_decay_ends_at_the_lowest_rate():
    schedule = ScheduleConfig(decay="linear", warmup_steps=2, min_rate=0.1)
    rates = [learning_rate(t, peak=0.9, total_steps=10, config=schedule) for t in range(11)]
    assert rates[:3] == pytest.approx([0.45, 0.9, 0.9])
    assert rates[2:] == pytest.approx([0.9 - 0.1 * t for t in range(9)])


def test_halving_starts_after_warmup():
    schedule = ScheduleConfig(decay="constant", warmup_steps=2, halve_every=3)
    rates = [learning_rate(s, peak=8.0, total_steps=11, config=schedule) for s in range(11)]
    assert rates == [4.0, 8.0, 8.0, 8.0, 8.0, 4.0, 4.0, 4.0, 2.0, 2.0, 2.0]


def test_warmup_at_a_constant_rate():
    """MP3, section 4.3: 500 updates of 1e-4, then 1e-3, halved every 10k updates."""
    schedule = ScheduleConfig(
        decay="constant", warmup_steps=500, warmup_rate=1e-4, halve_every=10_000
    )
    rates = [
        learning_rate(s, peak=1e-3, total_steps=30_000, config=schedule) for s in range(30_000)
    ]
    assert set(rates[:500]) == {1e-4}
    assert set(rates[500:10_500]) == {1e-3}
    assert set(rates[10_500:20_500]) == {5e-4}


def test_cosine_schedule_with_min_rate():
    """DeiT's minimum rate as in timm: min + (peak - min) (1 + cos(π t / T)) / 2."""
    schedule = ScheduleConfig(warmup_steps=0, min_rate=1e-5)
    for step in (0, 30, 99, 100):
        expected = 1e-5 + 0.5 * (1e-3 - 1e-5) * (1 + math.cos(math.pi * step / 100))
        rate = learning_rate(step, peak=1e-3, total_steps=100, config=schedule)
        assert rate == pytest.approx(expected)


def test_constant_schedule_stays_at_the_peak():
    schedule = ScheduleConfig(decay="constant")
    assert {learning_rate(s, peak=0.1, total_steps=9, config=schedule) for s in range(9)} == {0.1}


def test_parameter_groups_by_weight_decay():
    named = {
        "table": nn.Parameter(torch.ones(2, 2)),
        "first.kernel": nn.Parameter(torch.ones(2, 2)),
        "first.linear.bias": nn.Parameter(torch.ones(2)),
        "norm.linear.weight": nn.Parameter(torch.ones(2)),
        "convolution": nn.Parameter(torch.ones(2, 2, 3, 3)),
    }
    set_decay(named["table"], "never")
    config = OptimizerConfig(learning_rate=1e-3, weight_decay=0.1)
    decayed, others = parameter_groups(named.values(), config)
    assert [p is q for p, q in zip(decayed["params"], list(named.values())[1::3], strict=True)]
    assert decayed["weight_decay"] == 0.1
    assert others["weight_decay"] == 0.0
    assert len(decayed["params"]) == 2
    assert len(others["params"]) == 3
    config = OptimizerConfig(learning_rate=1e-3, weight_decay=0.0)
    assert len(parameter_groups(named.values(), config)) == 1


def test_parameter_groups_by_declared_options():
    """A discriminator may have its own rate and betas; a layer's rate multiplies with it."""
    plain, own = (nn.Parameter(torch.ones(2, 2)) for _ in range(2))
    add_options([own], ParamGroupOptions(0.5, betas=(0.5, 0.9)))
    add_options([plain, own], ParamGroupOptions(0.1))
    config = OptimizerConfig(learning_rate=1e-3, betas=(0.8, 0.95))
    first, second = build_optimizer([plain, own], config).param_groups
    assert first["params"][0] is plain
    assert (first["betas"], first["learning_rate_scale"]) == ((0.8, 0.95), 0.1)
    assert (second["betas"], second["learning_rate_scale"]) == ((0.5, 0.9), pytest.approx(0.05))


def test_missing_apex_raises(monkeypatch):
    monkeypatch.setitem(sys.modules, "apex.optimizers", None)
    config = OptimizerConfig(learning_rate=1e-3)
    with pytest.raises(UserError, match="NVIDIA Apex, which is not installed"):
        build_optimizer([nn.Parameter(torch.ones(1))], config, kernels="apex")


class FusedAdam(torch.optim.Optimizer):
    """A stub of Apex's FusedAdam, which ignores `found_inf`."""

    def __init__(self, groups, *, adam_w_mode, lr, betas, eps):
        assert adam_w_mode
        super().__init__(groups, {"lr": lr, "betas": betas, "eps": eps, "step": 0})

    def step(self, closure=None):
        for group in self.param_groups:
            group["step"] += 1
            for parameter in group["params"]:
                parameter.data.sub_(group["lr"] * parameter.grad)


def test_apex_skips_non_finite_gradients(context, monkeypatch):
    module = types.ModuleType("apex.optimizers")
    module.FusedAdam = FusedAdam
    monkeypatch.setitem(sys.modules, "apex", types.ModuleType("apex"))
    monkeypatch.setitem(sys.modules, "apex.optimizers", module)
    weight = nn.Parameter(torch.ones(2))
    config = OptimizerConfig(learning_rate=0.5)
    optimizer = build_optimizer([weight], config, kernels="apex")
    assert isinstance(optimizer, FusedAdam)
    norm = GradientNorm(optimizer, context.model.group, clip=0.0)
    for slope in (math.inf, math.nan):
        weight.grad = torch.tensor([slope, 1.0])
        optimizer.step()
        assert not norm.value.isfinite()
    assert weight.tolist() == [1.0, 1.0]
    assert optimizer.param_groups[0]["step"] == 0
    weight.grad = torch.tensor([1.0, 2.0])
    optimizer.step()
    assert weight.tolist() == [0.5, 0.0]
    assert optimizer.param_groups[0]["step"] == 1


@pytest.mark.parametrize(("clip", "length"), [(1.0, 1.0), (26.0, 13.0), (0.0, 13.0)])
def test_gradient_norm_is_measured_before_clipping(context, clip, length):
    """Longer gradients are clipped, shorter ones stay as they are; 0 clips none."""
    parameters = [nn.Parameter(torch.zeros(3)), nn.Parameter(torch.zeros(2, 2))]
    optimizer = torch.optim.SGD(parameters, lr=1.0, fused=True)
    norm = GradientNorm(optimizer, context.model.group, clip=clip)
    parameters[0].grad = torch.tensor([3.0, 0.0, 4.0])
    parameters[1].grad = torch.tensor([[0.0, 12.0], [0.0, 0.0]])
    optimizer.step()
    assert float(norm.value) == 13.0
    moved = torch.cat([p.detach().flatten() for p in parameters])
    assert float(moved.norm()) == pytest.approx(length, abs=1e-6)


def test_average_of_weights_leaves_out_skipped_steps():
    """It starts from the weights after the first step, and keeps 0.75 of itself in each other."""
    weight = nn.Parameter(torch.tensor([1.0]))
    optimizer = torch.optim.AdamW([weight], lr=0.1, fused=True)
    WeightAverage(0.75, types.SimpleNamespace(optimizer=optimizer))
    expected = None
    for is_skipped in (False, False, True, False):
        weight.grad = torch.ones(1)
        optimizer.found_inf = torch.tensor(float(is_skipped))
        optimizer.step()
        if not is_skipped:
            value = weight.item()
            expected = value if expected is None else 0.75 * expected + 0.25 * value
        assert optimizer.state[weight][AVERAGE].item() == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("count", [2, 3, 5])
def test_split_groups_reaches_the_given_count(count):
    parameters = [torch.nn.Parameter(torch.zeros(1)) for _ in range(5)]
    groups = [
        {"params": parameters[:1], "weight_decay": 0.1},
        {"params": parameters[1:], "weight_decay": 0.0},
    ]
    parts = split_groups(groups, count)
    assert len(parts) == count
    assert all(part["params"] for part in parts)
    decays = {id(p): part["weight_decay"] for part in parts for p in part["params"]}
    assert decays == {id(p): 0.0 if place else 0.1 for place, p in enumerate(parameters)}
    assert split_groups(parts, 1) == parts
