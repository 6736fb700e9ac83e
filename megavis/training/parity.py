"""Check every layout against a single process.

The same config, data and seed run for a few steps in each legal layout of N processes, and loss
and gradient norm of every step are compared with those of one process.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch

from megavis.config.errors import UserError
from megavis.config.load import LoadedConfig
from megavis.config.schema import RunConfig
from megavis.config.section import ParallelConfig
from megavis.config.yaml_tree import ConfigSource
from megavis.parallel.launch import Launch
from megavis.parallel.progress_bar import shown
from megavis.parallel.workers import WorkerError, WorkerPool
from megavis.planning.layouts import layout_name
from megavis.training.engine import Engine
from megavis.training.job import open_job
from megavis.training.trainer import Trainer

Curve = list[tuple[float, float]]
"""Loss and gradient norm of each step."""


@dataclass(frozen=True)
class ParityResult:
    """One layout against one process."""

    layout: str
    loss_difference: float
    """Largest relative difference of the loss over the steps and processes."""
    gradient_norm_difference: float
    """The same for the gradient norm."""
    tolerance: float
    error: str = ""
    """The error, if the layout did not run."""

    @property
    def passed(self) -> bool:
        """Whether both differences are within the tolerance."""
        worst = max(self.loss_difference, self.gradient_norm_difference)
        return not self.error and worst <= self.tolerance

    def as_json(self) -> dict[str, Any]:
        """Return the comparison as JSON."""
        return {**asdict(self), "passed": self.passed}


def parity_config(config: RunConfig) -> RunConfig:
    """Return the config without dropout and FP8, which differ legitimately."""
    plain = ParallelConfig(zero_stage=0 if config.training.precision == "float32" else 1)
    training = config.training.model_copy(update={"fp8": False})
    model = config.model.without_dropout()
    return config.model_copy(update={"model": model, "parallel": plain, "training": training})


def compare_layouts(
    config: RunConfig,
    layouts: list[ParallelConfig],
    *,
    num_processes: int,
    steps: int,
    tolerance: float,
    device: str | None,
    report: Callable[[ParityResult], None],
) -> list[ParityResult]:
    """Run each layout on real local processes and compare it with one process.

    Args:
        config: from `parity_config`.
        layouts: each for `num_processes` processes.
        tolerance: maximum relative difference.
        device: `cpu` or `cuda`, with a GPU for each process; default: see `device_for`.
        report: called with each comparison when it is done.
    """
    device = device_for(device, num_processes)
    # Forks of a process that has imported everything start at once; CUDA does not survive a fork.
    preload = () if device == "cuda" else ("megavis.training.trainer",)
    new_pool = functools.partial(WorkerPool, num_processes, preload=preload, quiet=True)
    pool = new_pool()
    try:
        reference = pool.run(train_briefly, 1, config, steps, device)[0]
        comparisons = []
        for parallel in shown(layouts, "layouts", total=len(layouts), unit="layout"):
            candidate = config.model_copy(update={"parallel": parallel})
            try:
                curves = pool.run(train_briefly, num_processes, candidate, steps, device)
                result = _compare(layout_name(parallel), curves, reference, tolerance)
            except WorkerError as error:
                result = ParityResult(
                    layout_name(parallel), float("inf"), float("inf"), tolerance, str(error)
                )
                pool = new_pool()
            comparisons.append(result)
            report(result)
        return comparisons
    finally:
        pool.close()


def device_for(name: str | None, num_processes: int) -> str:
    """Return the device of local processes: GPUs if each process has one, else the CPU.

    Raises:
        UserError: GPUs were requested, and there are fewer than processes.
    """
    visible = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if name == "cuda" and visible < num_processes:
        raise UserError(
            f"--device cuda: {num_processes} processes need a GPU each, and {visible} are visible;"
            " use --device cpu, or fewer --processes"
        )
    return name or ("cuda" if visible >= num_processes else "cpu")


def train_briefly(
    launch: Launch, config: RunConfig, steps: int, device: str | None = None
) -> Curve:
    """Train for some steps on this process's part; return loss and gradient norm of each."""
    loaded = LoadedConfig(config, ConfigSource("parity"))
    with open_job(loaded, launch, device=device) as context:
        run = Trainer.open(loaded, context)
        engine = Engine(config, run.objective, context)
        run.start(engine)
        loader = run.loader(engine)
        curve = []
        with loader:
            for step in range(steps):
                loss = engine.mean_over_data(engine.train_step(loader, step))
                curve.append((loss, engine.gradient_norm()))
        return curve


def _compare(layout: str, curves: list[Curve], reference: Curve, tolerance: float) -> ParityResult:
    differences = [
        [abs(mine - theirs) / abs(theirs) for mine, theirs in zip(ours, one, strict=True)]
        for curve in curves
        for ours, one in zip(curve, reference, strict=True)
    ]
    loss, norm = (max(column) for column in zip(*differences, strict=True))
    return ParityResult(layout, loss, norm, tolerance)
