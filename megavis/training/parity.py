"""Check every layout against a single process.

The same config, data and seed run for a few steps in each legal layout of N processes, and loss
and gradient norm of every step are compared with one process.

Layouts sum in different orders, so they round differently, and training can amplify this: without
warm-up, Adam's first steps have the size of the learning rate however small the gradient is, and
rounding may decide its sign. The effect of rounding alone is measured by training one process again
with the last bit of every weight changed; layouts are judged relative to it.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from megavis.config.errors import UserError
from megavis.config.schema import RunConfig
from megavis.config.section import ParallelConfig
from megavis.parallel.device import DTYPES
from megavis.parallel.launch import Launch
from megavis.parallel.progress_bar import shown
from megavis.parallel.random import derive_seed
from megavis.parallel.workers import WorkerError, WorkerPool
from megavis.planning.layouts import layout_name
from megavis.training.engine import Engine
from megavis.training.job import open_job
from megavis.training.trainer import Trainer

Curve = list[tuple[float, float]]
"""Loss and gradient norm of each step."""


PERTURBED_RUNS = 3
_MARGIN = 4.0
"""Allowed difference of a layout, in multiples of the measured noise: in small models of every
density, two runs that differ only in rounding diverged up to this much more than three others."""


@dataclass(frozen=True)
class Noise:
    """How far training diverges if the last bit of every weight is changed.

    Attributes:
        loss: relative difference of the loss from the run with unchanged weights, one value per
            step: the largest of several changes, over this step and all earlier ones.
        gradient_norm: the same for the gradient norm.
    """

    loss: tuple[float, ...]
    gradient_norm: tuple[float, ...]

    @classmethod
    def of(cls, perturbed: Sequence[Curve], reference: Curve) -> Noise:
        """Compare the curves of changed weights with those of unchanged ones."""
        loss, norm = zip(*_largest_by_step(perturbed, reference), strict=True)
        return cls(tuple(itertools.accumulate(loss, max)), tuple(itertools.accumulate(norm, max)))

    def tolerances(self, least: float) -> list[tuple[float, float]]:
        """Return how much loss and gradient norm of a layout may differ at each step.

        This is `least` at every step if the noise stays within it. Otherwise it is the noise up to
        that step times a margin, and at least `least`, so that early steps, before training
        amplifies rounding, stay strict.
        """
        is_quiet = max(self.loss[-1], self.gradient_norm[-1]) <= least
        margin = 0.0 if is_quiet else _MARGIN
        return [
            (max(least, margin * loss), max(least, margin * norm))
            for loss, norm in zip(self.loss, self.gradient_norm, strict=True)
        ]


@dataclass(frozen=True)
class ParityResult:
    """One layout against one process."""

    layout: str
    loss_difference: float
    """Largest relative difference of the loss over the steps and processes."""
    gradient_norm_difference: float
    """The same for the gradient norm."""
    loss_noise: float
    """Largest relative difference of the loss caused by changing the last bit of the weights."""
    gradient_norm_noise: float
    """The same for the gradient norm."""
    loss_tolerance: float
    """Largest allowed difference of the loss at any step."""
    gradient_norm_tolerance: float
    """The same for the gradient norm."""
    error: str = ""
    """First difference that is not allowed, or the error if the layout did not run."""

    @property
    def passed(self) -> bool:
        """Whether every difference is within the tolerance of its step."""
        return not self.error

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
    report_noise: Callable[[Noise], None],
    report: Callable[[ParityResult], None],
) -> list[ParityResult]:
    """Run each layout on real local processes and compare it with one process.

    Args:
        config: from `parity_config`.
        layouts: each for `num_processes` processes.
        tolerance: relative difference that is always allowed; see `Noise.tolerances`.
        device: `cpu` or `cuda`, with a GPU for each process; default: see `device_for`.
        report_noise: called with the noise of one process before any layout runs.
        report: called with each comparison when it is complete.

    Raises:
        UserError: one process cannot train, for example because there are no shards.
    """
    device = device_for(device, num_processes)
    # Forks of a process that has imported everything start quickly; CUDA does not survive a fork.
    preload = () if device == "cuda" else ("megavis.training.trainer",)
    new_pool = functools.partial(WorkerPool, num_processes, preload=preload, quiet=True)
    pool = new_pool()
    try:
        changes = (None, *range(PERTURBED_RUNS))
        alone = [pool.run(train_briefly, 1, config, steps, device, each)[0] for each in changes]
        reference = alone[0]
        noise = Noise.of(alone[1:], reference)
        report_noise(noise)
        comparisons = []
        for parallel in shown(layouts, "layouts", total=len(layouts), unit="layout"):
            candidate = config.model_copy(update={"parallel": parallel})
            name = layout_name(parallel)
            try:
                curves = pool.run(train_briefly, num_processes, candidate, steps, device)
                result = judge(name, curves, reference, noise, tolerance)
            except WorkerError as error:
                text = str(error.mistake or error)
                result = _result(name, (math.inf, math.inf), noise, tolerance, text)
                pool = new_pool()
            comparisons.append(result)
            report(result)
        return comparisons
    except WorkerError as error:
        if error.mistake is None:
            raise
        raise error.mistake from error
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
    launch: Launch,
    config: RunConfig,
    steps: int,
    device: str | None = None,
    change: int | None = None,
) -> Curve:
    """Train for some steps on this process's part; return loss and gradient norm of each.

    `change`: number of a change of the weights' last bits before the first step, drawn from the
    seed; None leaves them as they are.
    """
    with open_job(config, launch, device=device) as context:
        run = Trainer.open(config, context)
        engine = Engine(run.objective)
        run.task.start(engine)
        if change is not None:
            change_last_bits(engine, config, change)
        loader = run.loader(engine)
        curve = []
        with loader:
            for step in range(steps):
                loss = engine.mean_over_data(engine.train_step(loader, step))
                curve.append((loss, engine.gradient_norm()))
        return curve


def change_last_bits(engine: Engine, config: RunConfig, change: int) -> None:
    """Change every weight by one unit in the last place of the compute precision, up or down.

    The directions are drawn from the run's seed, `change` and the parameter's name. Zeros stay.
    """
    # For a number between two powers of two this is 0.75 to 1.5 units, which rounds to one.
    relative = 0.75 * torch.finfo(DTYPES[config.training.precision]).eps
    for name, parameter in engine.layers.named_parameters():
        weight = engine.states.get(parameter, "weight")
        seed = derive_seed(config.seed, "last bits", change, name) & (2**63 - 1)
        draws = torch.rand(weight.shape, generator=torch.Generator().manual_seed(seed))
        sign = torch.where(draws < 0.5, -1.0, 1.0).double().to(weight.device)
        changed = weight.double() * (1.0 + relative * sign)
        engine.states.set(parameter, "weight", changed.to(weight.dtype))


def judge(
    layout: str, curves: Sequence[Curve], reference: Curve, noise: Noise, tolerance: float
) -> ParityResult:
    """Compare the curves of a layout's processes with one process's.

    Args:
        layout: name of the layout.
        tolerance: as for `compare_layouts`.
    """
    by_step = _largest_by_step(curves, reference)
    largest = tuple(max(column) for column in zip(*by_step, strict=True))
    error = ""
    for step, (found, allowed) in enumerate(
        zip(by_step, noise.tolerances(tolerance), strict=True), start=1
    ):
        wrong = [i for i in range(2) if found[i] > allowed[i]]
        if wrong:
            error = " and ".join(
                f"the {('loss', 'gradient norm')[i]} by {found[i]:.1e}, where"
                f" {allowed[i]:.1e} is allowed"
                for i in wrong
            )
            error = f"step {step} differs: {error}"
            break
    return _result(layout, (largest[0], largest[1]), noise, tolerance, error)


def _result(
    layout: str, largest: tuple[float, float], noise: Noise, tolerance: float, error: str
) -> ParityResult:
    noises = noise.loss[-1], noise.gradient_norm[-1]
    return ParityResult(layout, *largest, *noises, *noise.tolerances(tolerance)[-1], error)


def _largest_by_step(curves: Sequence[Curve], reference: Curve) -> list[tuple[float, float]]:
    """Return the largest relative differences of loss and gradient norm at each step."""
    return [
        (
            max(_difference(curve[step][0], loss) for curve in curves),
            max(_difference(curve[step][1], norm) for curve in curves),
        )
        for step, (loss, norm) in enumerate(reference)
    ]


def _difference(mine: float, theirs: float) -> float:
    """Return |mine - theirs| / |theirs|; infinite if just one is finite, or zero."""
    if mine == theirs or (math.isnan(mine) and math.isnan(theirs)):
        return 0.0
    if not (math.isfinite(mine) and math.isfinite(theirs)) or theirs == 0.0:
        return math.inf
    return abs(mine - theirs) / abs(theirs)
