"""Estimate the cost of layouts, rank them, and explain the recommendation."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from megavis.config.errors import counted
from megavis.config.schema import RunConfig
from megavis.config.section import ParallelConfig
from megavis.planning.communication import Transfer, transfers
from megavis.planning.devices import Cluster
from megavis.planning.layouts import (
    Layout,
    all_layouts,
    layout_issues,
    with_layout,
    with_offload,
)
from megavis.planning.shape import ModelShape
from megavis.planning.states import RankMemory, rank_memory
from megavis.planning.step_time import StepTime, step_time

_DAY = 86_400.0
# Estimates within this factor count as equal; then the simpler layout wins.
_EQUAL = 1.03
# With fewer parameters than this, ZeRO-3 is left out if ZeRO 0 to 2 fit: states take little memory,
# and the overlap of its gathers with computation is only assumed.
_FEW = 3e9
_CHECKPOINTING = ("none", "selective", "full")


@dataclass(frozen=True)
class Plan:
    """A layout and its cost.

    `memory` is that of the process with the highest peak, `traffic` that of one process per step,
    and `steps` the length of the run.
    """

    layout: Layout
    memory: RankMemory
    traffic: tuple[Transfer, ...]
    time: StepTime
    steps: int
    fits: bool

    @property
    def days(self) -> float:
        """Duration of the run in days, without validation and checkpoints."""
        return self.steps * self.time.total / _DAY

    @property
    def complexity(self) -> tuple[int, ...]:
        """Sort key: features used beyond plain data parallelism."""
        layout = self.layout
        return (
            layout.pipeline,
            layout.tensor,
            layout.context,
            _CHECKPOINTING.index(layout.parallel.activation_checkpointing),
            layout.zero_stage,
            int(layout.parallel.sequence_parallel),
        )


@dataclass(frozen=True)
class Recommendation:
    """The legal layouts, those that fit first, fastest first, then the others, smallest first.

    `best` is the simplest of the fastest ones, if any fits; each reason is a sentence.
    """

    plans: tuple[Plan, ...]
    best: Plan | None
    reasons: tuple[str, ...]

    @property
    def fitting(self) -> tuple[Plan, ...]:
        """The plans that fit."""
        return tuple(plan for plan in self.plans if plan.fits)


def plan_layout(shape: ModelShape, layout: Layout, cluster: Cluster, *, steps: int) -> Plan:
    """Return the cost of a layout."""
    memory = rank_memory(shape, layout)
    traffic = tuple(transfers(shape, layout, cluster.devices_per_node))
    return Plan(
        layout=layout,
        memory=memory,
        traffic=traffic,
        time=step_time(shape, layout, cluster, traffic),
        steps=steps,
        fits=memory.total <= cluster.usable_memory,
    )


def recommend(config: RunConfig, shape: ModelShape, cluster: Cluster) -> Recommendation:
    """Plan every legal layout; offload the optimizer only if nothing fits otherwise."""
    layouts = list(all_layouts(config, cluster.num_devices))
    plans = _plan_all(config, shape, cluster, layouts)
    if not any(plan.fits for plan in plans):
        plans += _plan_all(config, shape, cluster, with_offload(config, layouts))
    fitting = sorted((plan for plan in plans if plan.fits), key=lambda plan: plan.time.total)
    others = sorted((plan for plan in plans if not plan.fits), key=lambda plan: plan.memory.total)
    ordered = (*fitting, *others)
    if not fitting:
        reason = _nothing_fits(others[0], cluster) if others else _nothing_is_legal(config, cluster)
        return Recommendation(ordered, None, (reason,))
    proven = [plan for plan in fitting if not plan.layout.is_experimental]
    if not proven:
        return Recommendation(ordered, None, (_only_experimental(fitting[0]),))
    # Waiting for the host wastes device time, and is the least certain estimate.
    chosen = [plan for plan in proven if not plan.time.waits_for_host] or proven
    if shape.layers.total < _FEW:
        chosen = [plan for plan in chosen if plan.layout.zero_stage < 3] or chosen
    slowest = chosen[0].time.total * _EQUAL
    equal = [plan for plan in chosen if plan.time.total <= slowest]
    best = min(equal, key=lambda plan: (plan.complexity, plan.memory.total))
    reasons = _reasons(best, ordered, equal, cluster, is_small=shape.layers.total < _FEW)
    return Recommendation(ordered, best, tuple(reasons))


def _plan_all(
    config: RunConfig, shape: ModelShape, cluster: Cluster, layouts: Iterable[Layout]
) -> list[Plan]:
    steps = config.training.steps
    return [plan_layout(shape, layout, cluster, steps=steps) for layout in layouts]


def _nothing_is_legal(config: RunConfig, cluster: Cluster) -> str:
    """Return why data parallelism alone is refused, in the words of training."""
    plain = with_layout(config, ParallelConfig(zero_stage=1))
    issues = [f"{key}: {text}" for key, text in layout_issues(plain, cluster.num_devices)]
    processes = counted(cluster.num_devices, "process", "processes")
    return f"no layout is legal on {processes}: {'; '.join(issues)}"


def _nothing_fits(least: Plan, cluster: Cluster) -> str:
    return (
        f"no layout fits into {cluster.usable_memory / 1e9:.1f} GB: the smallest,"
        f" {least.layout.name}, needs {least.memory.total / 1e9:.1f} GB; use more or larger GPUs"
    )


def _only_experimental(fastest: Plan) -> str:
    return (
        f"only layouts with pipeline stages and ZeRO 2 or 3 fit, such as {fastest.layout.name};"
        " they are experimental, so none is recommended; use more or larger GPUs, or set one"
        " yourself"
    )


_Simpler = tuple[str, Callable[[Layout], bool], Callable[[Layout], bool]]

# Description of a feature, whether a layout has it, and which layouts do not.
_FEATURES: tuple[_Simpler, ...] = (
    ("ZeRO-{0.zero_stage}", lambda own: own.zero_stage > 1, lambda other: other.zero_stage <= 1),
    ("tensor size {0.tensor}", lambda own: own.tensor > 1, lambda other: other.tensor == 1),
    ("context size {0.context}", lambda own: own.context > 1, lambda other: other.context == 1),
    (
        "{0.pipeline} pipeline stages",
        lambda own: own.pipeline > 1,
        lambda other: other.pipeline == 1,
    ),
    (
        "activation_checkpointing {0.parallel.activation_checkpointing}",
        lambda own: own.parallel.activation_checkpointing != "none",
        lambda other: other.parallel.activation_checkpointing == "none",
    ),
    (
        "the optimizer on the CPU",
        lambda own: own.parallel.offload_optimizer != "none",
        lambda other: other.parallel.offload_optimizer == "none",
    ),
)


def _reasons(
    best: Plan, plans: Iterable[Plan], equal: list[Plan], cluster: Cluster, *, is_small: bool
) -> Iterable[str]:
    """Yield, for each feature of the best layout, the effect of going without it.

    Args:
        best: the recommended plan.
        plans: all plans.
        equal: the plans that count as the fastest.
        cluster: the cluster of the plans.
        is_small: whether ZeRO-3 is left out if another stage fits.
    """
    plans = list(plans)
    num_fitting = sum(plan.fits for plan in plans)
    yield (
        f"the simplest, then the smallest, of {counted(len(equal), 'layout')} within"
        f" {_EQUAL - 1:.0%} of the fastest, of {num_fitting} that fit"
    )
    yield from _left_out(best, plans, is_small=is_small)
    plans = [
        plan
        for plan in plans
        if not plan.layout.is_experimental and plan.time.waits_for_host <= best.time.waits_for_host
    ]
    for words, has, lacks in _FEATURES:
        if not has(best.layout):
            continue
        without = [plan for plan in plans if lacks(plan.layout)]
        if without:
            yield f"{words.format(best.layout)}: {_without(best, without[0], cluster)}"
    if best.layout.tensor == best.layout.pipeline == 1:
        yield "tensor and pipeline parallelism only cost time if the weights fit without them"


def _left_out(best: Plan, plans: list[Plan], *, is_small: bool) -> Iterable[str]:
    """Yield why faster layouts are not recommended."""
    if best.time.waits_for_host:
        yield "the host, which launches kernels one by one, bounds every layout that fits"
        return
    faster = [plan for plan in plans if plan.fits and plan.time.total < best.time.total]
    if is_small and best.layout.zero_stage < 3:
        gathered = [plan for plan in faster if plan.layout.zero_stage == 3]
        faster = [plan for plan in faster if plan.layout.zero_stage < 3]
        if gathered:
            gain = 1 - gathered[0].time.total / best.time.total
            yield (
                f"left out: ZeRO-3, below {_FEW / 1e9:g} B parameters, up to {gain:.0%} faster if"
                f" its communication overlaps as assumed: {gathered[0].layout.name}"
            )
    waiting = [plan for plan in faster if plan.time.waits_for_host]
    if waiting:
        gain = 1 - waiting[0].time.total / best.time.total
        yield (
            f"left out: {counted(len(waiting), 'faster layout')} that the host bounds, up to"
            f" {gain:.0%} faster by estimate: {waiting[0].layout.name}"
        )


def _without(best: Plan, other: Plan, cluster: Cluster) -> str:
    name = f"without it the best, {other.layout.name},"
    if not other.fits:
        taken, usable = other.memory.total / 1e9, cluster.usable_memory / 1e9
        return f"{name} needs {taken:.1f} GB of {usable:.1f}"
    slower = other.time.total / best.time.total - 1
    if slower <= 0:
        return f"{name} is no simpler"
    return f"{name} is {slower:.0%} slower"
