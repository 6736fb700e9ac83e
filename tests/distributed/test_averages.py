"""Precision of gradient reduction, initial weights, collective timeouts, deterministic options."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from layout_curves import make_config, with_layout

from megavis.config.schema import RunConfig
from megavis.parallel.agreement import AsyncFlag
from megavis.parallel.launch import Launch
from megavis.training.engine import Engine
from megavis.training.faults.watchdog import Watchdog, collective_timeout
from megavis.training.job import open_job
from megavis.training.parity import Curve, train_briefly
from megavis.training.trainer import Trainer

pytestmark = pytest.mark.once

COLLECTIVES = ("all_reduce", "reduce", "reduce_scatter", "reduce_scatter_tensor")
# Smaller tensors are losses and norms, not gradient buckets.
FEWEST = 64


def in_precision(config: RunConfig, precision: str, **training: Any) -> RunConfig:
    update = {"precision": precision, **training}
    return config.model_copy(update={"training": config.training.model_copy(update=update)})


def dtypes_of_sums(launch: Launch, config: RunConfig) -> set[str]:
    """Take two steps; return the dtypes of all reduced tensors."""
    found = set()

    def noting(collective: Any) -> Any:
        def note(*args: Any, **options: Any) -> Any:
            given = [*args, *options.values()]
            tensors = [t for t in given if isinstance(t, torch.Tensor)]
            found.update(str(t.dtype) for t in tensors if t.numel() >= FEWEST)
            return collective(*args, **options)

        return note

    with pytest.MonkeyPatch.context() as patch:
        for name in COLLECTIVES:
            patch.setattr(dist, name, noting(getattr(dist, name)))
        train_briefly(launch, config, 2, "cpu")
    return found


@pytest.mark.parametrize(
    ("processes", "layout"),
    [
        (2, {"zero_stage": 1}),
        (2, {"zero_stage": 2}),
        (2, {"zero_stage": 3}),
        (4, {"zero_stage": 1, "pipeline_model_parallel_size": 2}),
        (4, {"zero_stage": 2, "pipeline_model_parallel_size": 2}),
    ],
    ids=str,
)
def test_bf16_gradients_are_reduced_in_float32(
    run_job: Any, tiny_config: Path, processes: int, layout: dict[str, Any]
) -> None:
    config = in_precision(with_layout(make_config(tiny_config), **layout), "bf16")
    for found in run_job(dtypes_of_sums, processes, config):
        assert found == {"torch.float32"}
    half = in_precision(config, "bf16", reduce_precision="compute")
    for found in run_job(dtypes_of_sums, processes, half):
        assert "torch.bfloat16" in found


def first_weights(launch: Launch, config: RunConfig) -> dict[str, torch.Tensor]:
    """Return the initial master weights and buffers of a run."""
    with open_job(config, launch, device="cpu") as context:
        engine = Engine(Trainer.open(config, context).objective)
        weights = dict(engine.layers.named_parameters())
        found = {name: engine.states.get(p, "weight").clone() for name, p in weights.items()}
        return found | {name: buffer.clone() for name, buffer in engine.layers.named_buffers()}


@pytest.mark.parametrize("precision", ["float32", "bf16"])
def test_initial_weights_match_one_process(run_job: Any, tiny_config: Path, precision: str) -> None:
    config = in_precision(make_config(tiny_config), precision)
    (one,) = run_job(first_weights, 1, with_layout(config, zero_stage=1))
    for found in run_job(first_weights, 2, with_layout(config, zero_stage=3)):
        assert found.keys() == one.keys()
        assert all(torch.equal(found[name], one[name]) for name in one)


def timeouts(launch: Launch, config: RunConfig) -> list[float]:
    """Return the collective timeout of each process group while the watchdog is active."""
    with open_job(config, launch, device="cpu") as context:
        Engine(Trainer.open(config, context).objective)
        AsyncFlag()
        with Watchdog(context, patience=config.training.hang_timeout):
            groups = list(dist.distributed_c10d._world.pg_map)
            backends = [group._get_backend(torch.device("cpu")) for group in groups]
            return [backend.options._timeout.total_seconds() for backend in backends]


def test_collective_timeouts_exceed_the_watchdogs(run_job: Any, tiny_config: Path) -> None:
    config = in_precision(make_config(tiny_config), "float32", hang_timeout=500.0)
    layout = with_layout(config, pipeline_model_parallel_size=2)
    for found in run_job(timeouts, 2, layout):
        assert len(found) > 5
        assert set(found) == {collective_timeout(500.0)}
    assert collective_timeout(500.0) > 10 * 500.0
    assert collective_timeout(0.0) > 24 * 3600


def arithmetic(launch: Launch, config: RunConfig) -> tuple[bool, bool, Curve]:
    """Return whether a job is deterministic and uses TF32, and its curve."""
    with open_job(config, launch, device="cpu"):
        chosen = torch.are_deterministic_algorithms_enabled(), torch.backends.cudnn.allow_tf32
    return *chosen, train_briefly(launch, config, 3, "cpu")


def test_deterministic_and_tf32_options(run_job: Any, tiny_config: Path) -> None:
    plain = in_precision(make_config(tiny_config), "float32")
    chosen = in_precision(plain, "float32", deterministic=True, tf32=True)
    deterministic, tf32, curve = run_job(arithmetic, 1, chosen)[0]
    assert (deterministic, tf32) == (True, True)
    # On a CPU neither changes the result.
    assert run_job(arithmetic, 1, plain)[0] == (False, False, curve)
