"""Adafactor against transformers and plain arithmetic, and the layouts it refuses."""

import json
import math

import pytest
import torch
from transformers import Adafactor as TransformersAdafactor

from megavis.cli import main
from megavis.config.errors import UserError
from megavis.config.load import load_config
from megavis.config.schema import OptimizerConfig
from megavis.model.parameters import ParamGroupOptions, add_options
from megavis.training.adafactor import Slice, held_parts
from megavis.training.optimizer import build_optimizer

pytestmark = pytest.mark.once

SETTINGS = {"learning_rate": 0.01, "betas": (0.9, 0.95), "algorithm": "adafactor"}
SHAPES = {"matrix": (40, 32), "thin": (40, 31), "bias": (7,), "kernel": (33, 4, 3)}


def parameters():
    generator = torch.Generator().manual_seed(0)
    return {
        name: torch.nn.Parameter(torch.randn(shape, generator=generator))
        for name, shape in SHAPES.items()
    }


def gradients(step):
    generator = torch.Generator().manual_seed(1 + step)
    return [torch.randn(shape, generator=generator) for shape in SHAPES.values()]


def trained(named, optimizer, steps):
    for step in range(steps):
        for parameter, gradient in zip(named.values(), gradients(step), strict=True):
            parameter.grad = gradient
        optimizer.step()
    return {name: parameter.detach() for name, parameter in named.items()}


def test_steps_match_transformers():
    """Compare where β2 is below its bound, on matrices that both factor and on vectors."""
    named, theirs = parameters(), parameters()
    made = trained(named, build_optimizer(named.values(), OptimizerConfig(**SETTINGS)), 20)
    # Its momentum includes the learning rate, which is constant here.
    optimizer = TransformersAdafactor(
        list(theirs.values()),
        lr=0.01,
        eps=(1e-30, 1e-3),
        clip_threshold=1e9,
        beta1=0.9,
        scale_parameter=False,
        relative_step=False,
    )
    expected = trained(theirs, optimizer, 20)
    for name in ("matrix", "bias"):
        torch.testing.assert_close(made[name], expected[name])
    # transformers also factors kernels and matrices with a side below 32.
    assert not torch.allclose(made["thin"], expected["thin"], atol=1e-3)


def test_steps_match_plain_arithmetic():
    """Run enough steps to reach the bound of β2: 1 - 43^-0.8 > 0.95."""
    named, count = parameters(), 60
    weights = {name: parameter.detach().double() for name, parameter in named.items()}
    settings = {**SETTINGS, "weight_decay": 0.1}
    made = trained(named, build_optimizer(named.values(), OptimizerConfig(**settings)), count)
    rows, columns = torch.zeros(40, 1).double(), torch.zeros(1, 32).double()
    momenta = {name: torch.zeros(shape).double() for name, shape in SHAPES.items()}
    squares = {name: torch.zeros(shape).double() for name, shape in SHAPES.items()}
    for step in range(count):
        beta = min(0.95, 1.0 - (step + 1) ** -0.8)
        for name, gradient in zip(SHAPES, gradients(step), strict=True):
            gradient = gradient.double()
            if name == "matrix":
                rows = beta * rows + (1 - beta) * gradient.square().mean(1, keepdim=True)
                columns = beta * columns + (1 - beta) * gradient.square().mean(0, keepdim=True)
                mean_squares = rows * columns / rows.mean()
            else:
                squares[name] = beta * squares[name] + (1 - beta) * gradient.square()
                mean_squares = squares[name]
            momenta[name] = 0.9 * momenta[name] + 0.1 * gradient / mean_squares.sqrt()
            decay = 0.0 if name == "bias" else 0.1
            weights[name] = weights[name] - 0.01 * (momenta[name] + decay * weights[name])
    for name in SHAPES:
        torch.testing.assert_close(made[name].double(), weights[name], rtol=1e-4, atol=1e-5)


def test_layer_learning_rate_does_not_scale_decay():
    named = parameters()
    add_options([named["matrix"]], ParamGroupOptions(0.1))
    before = named["matrix"].detach().clone()
    config = OptimizerConfig(**{**SETTINGS, "weight_decay": 0.5})
    optimizer = build_optimizer(named.values(), config)
    for group in optimizer.param_groups:  # the engine sets it before each step
        group["lr"] = 0.01 * group["learning_rate_scale"]
    for parameter in named.values():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    torch.testing.assert_close(named["matrix"].detach(), before * (1 - 0.01 * 0.5))


def test_non_finite_gradients_skip_the_step():
    named = parameters()
    optimizer = build_optimizer(named.values(), OptimizerConfig(**SETTINGS))
    before = {name: value.clone() for name, value in trained(named, optimizer, 3).items()}
    named["matrix"].grad.fill_(math.inf)
    optimizer.found_inf = torch.ones(())
    optimizer.step()
    torch.testing.assert_close({name: p.detach() for name, p in named.items()}, before)
    assert all(float(state["step"]) == 3 for state in optimizer.state.values())
    assert all(state["exp_avg_sq"].isfinite().all() for state in optimizer.state.values())


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_resume_is_exact(tmp_path, tiny_config, stage):
    words = ["optimizer.algorithm=adafactor", "schedule.decay=constant", "checkpoint.every=2"]
    words += ["schedule.warmup_steps=0"]
    words += [f"parallel.zero_stage={stage}", "training.log_every=1", f"output={tmp_path}"]

    def losses(name, *steps):
        for count in steps:
            more = [f"name={name}", f"training.steps={count}", "training.validate_every=0"]
            assert main(["train", str(tiny_config), *words, *more, "--device", "cpu"]) == 0
        lines = (tmp_path / name / "metrics.jsonl").read_text().splitlines()
        return [json.loads(line)["loss"] for line in lines if "loss" in json.loads(line)]

    whole = losses("whole", 4)
    assert len(whole) == 4
    assert losses("parts", 2, 4) == whole


@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("count", [1, 2, 3])
def test_numbers_of_a_group_are_found_in_parts(count, stage):
    """Parts as DeepSpeed cuts them: of all slices end to end, or of each slice."""
    shapes = [(3, 4), (5,), (2, 7), (1,)]
    whole = [torch.arange(math.prod(shape)) + 100 * number for number, shape in enumerate(shapes)]
    groups = [torch.cat(whole)] if stage == 1 else whole
    cut = [torch.nn.functional.pad(g, (0, -len(g) % count), value=-1).chunk(count) for g in groups]
    found = torch.zeros(len(shapes), dtype=torch.long)
    slices = [
        Slice(shape, None, True, None if stage == 1 else len(parts[0]))
        for shape, parts in zip(shapes, cut if stage == 3 else cut * len(shapes), strict=True)
    ]
    for rank in range(count):
        part = torch.cat([parts[rank] for parts in cut])
        for number, held in enumerate(held_parts(slices, len(part), rank)):
            expected = whole[number][held.first : held.first + held.count] if held.count else []
            assert part[held.within].tolist() == list(map(int, expected))
            found[number] += held.count
    assert found.tolist() == [math.prod(shape) for shape in shapes]


def test_offload_to_a_disk_is_refused(tiny_config):
    words = ["optimizer.algorithm=adafactor", "parallel.zero_stage=3", "parallel.nvme_path=/d"]
    load_config(tiny_config, [*words, "parallel.offload_optimizer=cpu"])
    with pytest.raises(UserError, match="parallel.offload_optimizer: nvme has not been tested"):
        load_config(tiny_config, [*words, "parallel.offload_optimizer=nvme"])
