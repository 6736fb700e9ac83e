"""The cost of a layout, a ranking of all legal ones, and the reason for the recommended one."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from megavis.config.schema import RunConfig
from megavis.planning.communication import Transfer, transfers
from megavis.planning.hardware import Cluster
from megavis.planning.layouts import Layout, all_layouts, with_offload
from megavis.planning.shape import ModelShape
from megavis.planning.states import RankMemory, rank_memory
from megavis.planning.time import StepTime, step_time

_DAY = 86_400.0
# Estimates closer than this are taken as equal, and the simpler layout wins.
_EQUAL = 1.03
_CHECKPOINTING = ("none", "selective", "full")


@dataclass(frozen=True)
class Plan:
    """A layout and what it costs.

    Attributes:
        layout: which.
        memory: of the fullest process.
        traffic: what a process sends in a step.
        time: of a step.
        steps: of the whole run.
        fits: the memory is enough.
    """

    layout: Layout
    memory: RankMemory
    traffic: tuple[Transfer, ...]
    time: StepTime
    steps: int
    fits: bool

    @property
    def days(self) -> float:
        """Of the whole run, without validation and checkpoints."""
        return self.steps * self.time.total / _DAY

    @property
    def complexity(self) -> tuple[int, ...]:
        """What a layout has besides plain data parallelism; the less, the simpler."""
        layout = self.layout
        return (
            layout.pipeline,
            layout.tensor,
            _CHECKPOINTING.index(layout.parallel.activation_checkpointing),
            layout.zero_stage,
            int(layout.parallel.sequence_parallel),
        )


@dataclass(frozen=True)
class Recommendation:
    """The layouts that are legal, and the one to take.

    Attributes:
        plans: those that fit, the fastest first; then the others, the smallest first.
        best: the simplest of those that are as fast as the fastest; None where none fits.
        reasons: why, a sentence each.
    """

    plans: tuple[Plan, ...]
    best: Plan | None
    reasons: tuple[str, ...]

    @property
    def fitting(self) -> tuple[Plan, ...]:
        """Those that fit."""
        return tuple(plan for plan in self.plans if plan.fits)


def plan_layout(shape: ModelShape, layout: Layout, cluster: Cluster, *, steps: int) -> Plan:
    """Return what one layout costs."""
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
    """Plan every legal layout; with the optimizer on the CPU only where nothing fits without."""
    layouts = list(all_layouts(config, cluster.num_devices))
    plans = _plan_all(config, shape, cluster, layouts)
    if not any(plan.fits for plan in plans):
        plans += _plan_all(config, shape, cluster, with_offload(layouts))
    fitting = sorted((plan for plan in plans if plan.fits), key=lambda plan: plan.time.total)
    others = sorted((plan for plan in plans if not plan.fits), key=lambda plan: plan.memory.total)
    ordered = (*fitting, *others)
    if not fitting:
        return Recommendation(ordered, None, (_nothing_fits(others, cluster),))
    slowest = fitting[0].time.total * _EQUAL
    equal = [plan for plan in fitting if plan.time.total <= slowest]
    best = min(equal, key=lambda plan: (plan.complexity, plan.memory.total))
    return Recommendation(ordered, best, tuple(_reasons(best, ordered, cluster)))


def _plan_all(
    config: RunConfig, shape: ModelShape, cluster: Cluster, layouts: Iterable[Layout]
) -> list[Plan]:
    steps = config.training.steps
    return [plan_layout(shape, layout, cluster, steps=steps) for layout in layouts]


def _nothing_fits(others: list[Plan], cluster: Cluster) -> str:
    if not others:
        return (
            f"no layout is legal on {cluster.num_devices} processes; training.batch_size must"
            " divide by the data-parallel size"
        )
    least = others[0]
    return (
        f"nothing fits into {cluster.usable_memory / 1e9:.1f} GB: the smallest,"
        f" {least.layout.name}, takes {least.memory.total / 1e9:.1f} GB; use more or larger GPUs"
    )


_Simpler = tuple[str, Callable[[Layout], bool], Callable[[Layout], bool]]

# What a layout may have, whether it has it, and which others do without.
_FEATURES: tuple[_Simpler, ...] = (
    (
        "ZeRO-{0.zero_stage}",
        lambda own: own.zero_stage > 1,
        lambda other: other.zero_stage <= 1,
    ),
    (
        "tensor size {0.tensor}",
        lambda own: own.tensor > 1,
        lambda other: other.tensor == 1,
    ),
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


def _reasons(best: Plan, plans: Iterable[Plan], cluster: Cluster) -> Iterable[str]:
    """Say for each thing that the best layout has what happens without it."""
    plans = list(plans)
    num_fitting = sum(plan.fits for plan in plans)
    yield (
        f"the simplest, and then the smallest, of the {num_fitting} that fit and are within"
        f" {_EQUAL - 1:.0%} of the fastest"
    )
    for words, has, lacks in _FEATURES:
        if not has(best.layout):
            continue
        without = [plan for plan in plans if lacks(plan.layout)]
        if without:
            yield f"{words.format(best.layout)}: {_without(best, without[0], cluster)}"
    if best.layout.tensor == best.layout.pipeline == 1:
        yield "tensor and pipeline parallelism only cost time where weights fit without"


def _without(best: Plan, other: Plan, cluster: Cluster) -> str:
    name = f"without it the best, {other.layout.name},"
    if not other.fits:
        taken, usable = other.memory.total / 1e9, cluster.usable_memory / 1e9
        return f"{name} takes {taken:.1f} GB of {usable:.1f}"
    slower = other.time.total / best.time.total - 1
    if slower <= 0:
        return f"{name} is no simpler"
    return f"{name} is {slower:.0%} slower"
