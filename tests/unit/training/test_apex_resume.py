"""Resuming with an Adam that counts steps in its parameter groups, as NVIDIA Apex's does."""

import json
import sys
import types

import pytest
import torch

from megavis.checkpoint.format.folder import latest_checkpoint
from megavis.checkpoint.format.manifest import read_manifest
from megavis.cli import main
from megavis.model.kernels import choose_kernels


class FusedAdam(torch.optim.Optimizer):
    """A stand-in that, like Apex's, has no count before its first step and none per parameter."""

    def __init__(self, groups, *, adam_w_mode, lr, betas, eps):
        assert adam_w_mode
        super().__init__(groups, {"lr": lr, "betas": betas, "eps": eps})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            if not group["params"]:
                continue  # of another call, under ZeRO-3
            group["step"] = group.get("step", 0) + 1
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state["exp_avg"] = torch.zeros_like(parameter)
                    state["exp_avg_sq"] = torch.zeros_like(parameter)
                self._move(parameter, state, group)

    def _move(self, parameter, state, group):
        (one, two), step = group["betas"], group["step"]
        mean = state["exp_avg"].lerp_(parameter.grad, 1 - one) / (1 - one**step)
        square = state["exp_avg_sq"].lerp_(parameter.grad**2, 1 - two) / (1 - two**step)
        parameter.mul_(1 - group["lr"] * group["weight_decay"])
        parameter.sub_(group["lr"] * mean / (square.sqrt() + group["eps"]))


@pytest.fixture
def apex(monkeypatch):
    """Install the stand-in; on a CPU its norms are not used."""
    optimizers, norms = (
        types.ModuleType(f"apex.{name}") for name in ("optimizers", "normalization")
    )
    optimizers.FusedAdam, norms.fused_layer_norm = FusedAdam, None
    monkeypatch.setitem(sys.modules, "apex", types.ModuleType("apex"))
    monkeypatch.setitem(sys.modules, "apex.optimizers", optimizers)
    monkeypatch.setitem(sys.modules, "apex.normalization", norms)
    yield
    choose_kernels("auto")


@pytest.mark.parametrize("zero_stage", [0, 2, 3])
def test_resume_keeps_the_step_count_of_a_group(small_config, tmp_path, apex, zero_stage):
    words = ["schedule={decay: constant}", "training.log_every=1", "training.kernels=apex"]
    words += ["optimizer.weight_decay=0.1", f"parallel.zero_stage={zero_stage}"]
    words += [f"output={tmp_path}"]

    def train(name, steps):
        run = [f"name={name}", f"training.steps={steps}"]
        assert main(["train", str(small_config), "--device", "cpu", *words, *run]) == 0
        assert read_manifest(latest_checkpoint(tmp_path / name)).optimizer_step == steps
        lines = (tmp_path / name / "metrics.jsonl").read_text().splitlines()
        return [json.loads(line).get("loss") for line in lines]

    whole = train("whole", 6)
    for steps in (2, 4):
        train("resumed", steps)
    assert train("resumed", 6) == pytest.approx(whole, rel=1e-6)
