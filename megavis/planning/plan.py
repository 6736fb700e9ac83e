"""Estimate the cost of layouts, rank them, and explain the recommendation.

Estimates of time are accurate enough to rank layouts. A step has matrix products at a fraction of
the device's peak, element-wise operations at a fraction of its memory bandwidth, the pipeline
bubble, and communication that does not overlap. All fractions are assumptions in this file; none
has been fitted to megavis on a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from megavis.config.errors import counted
from megavis.config.schema import RunConfig
from megavis.planning.block_activations import block_activations
from megavis.planning.communication import Transfer, transfers
from megavis.planning.devices import Cluster
from megavis.planning.layouts import Layout, all_layouts, with_offload
from megavis.planning.shape import ModelShape
from megavis.planning.states import RankMemory, parameters_held, rank_memory

_DAY = 86_400.0
# Estimates within this factor count as equal; then the simpler layout wins.
_EQUAL = 1.03
_CHECKPOINTING = ("none", "selective", "full")


@dataclass(frozen=True)
class Plan:
    """A layout and its cost.

    `memory` is that of the process with the highest peak, `traffic` that of a process per step, and
    `steps` the length of the run.
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
            f"no layout is legal on {counted(cluster.num_devices, 'process', 'processes')};"
            " training.batch_size must divide by the data-parallel size"
        )
    least = others[0]
    return (
        f"no layout fits into {cluster.usable_memory / 1e9:.1f} GB: the smallest,"
        f" {least.layout.name}, needs {least.memory.total / 1e9:.1f} GB; use more or larger GPUs"
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


def _reasons(best: Plan, plans: Iterable[Plan], cluster: Cluster) -> Iterable[str]:
    """Yield, for each feature of the best layout, the effect of going without it."""
    plans = list(plans)
    num_fitting = sum(plan.fits for plan in plans)
    yield (
        f"the simplest, then the smallest, of the {num_fitting} that fit and are within"
        f" {_EQUAL - 1:.0%} of the fastest"
    )
    for words, has, lacks in _FEATURES:
        if not has(best.layout):
            continue
        without = [plan for plan in plans if lacks(plan.layout)]
        if without:
            yield f"{words.format(best.layout)}: {_without(best, without[0], cluster)}"
    if best.layout.tensor == best.layout.pipeline == 1:
        yield "tensor and pipeline parallelism only cost time if the weights fit without them"


def _without(best: Plan, other: Plan, cluster: Cluster) -> str:
    name = f"without it the best, {other.layout.name},"
    if not other.fits:
        taken, usable = other.memory.total / 1e9, cluster.usable_memory / 1e9
        return f"{name} needs {taken:.1f} GB of {usable:.1f}"
    slower = other.time.total / best.time.total - 1
    if slower <= 0:
        return f"{name} is no simpler"
    return f"{name} is {slower:.0%} slower"


# Fraction of peak that a large matrix product reaches, and the sizes at which it reaches half of
# that: rows (tokens of a micro-batch) and columns (of this process's part of a matrix).
_PRODUCT_SHARE, _HALF_ROWS, _HALF_COLUMNS = 0.7, 256.0, 128.0
# Fraction of peak of links and of memory; latency of a collective in seconds.
_LINK_SHARE, _MEMORY_SHARE, _LATENCY = 0.8, 0.7, 20e-6
# Memory accesses per saved activation: written once, read by the next operation and in the backward
# pass; its gradient is written and read.
_TOUCHES = 5.0
# Of each that `selective` frees: its function's input read, itself written, and copied into place.
_TOUCHES_AGAIN = 4.0
# Fraction of overlapped communication by which it slows down computation.
_FELT = 0.1
# Seconds of the host per block and micro-batch, forward and backward, by ZeRO stage: it launches
# kernels one by one, and under ZeRO-3 gathers and frees weights. Medians over four presets on one
# core of an AMD EPYC, with blocks so narrow that their arithmetic counts for little (2026-11-23).
_HOST_BLOCK = {0: 2.7e-3, 1: 2.7e-3, 2: 2.7e-3, 3: 5.8e-3}
# Offloaded states: bytes/s between GPU and CPU, and of a node's memory during Adam.
_PCIE, _CPU_MEMORY = 20e9, 150e9


@dataclass(frozen=True)
class StepTime:
    """Seconds per optimizer step by kind, and the resulting MFU.

    Attributes:
        products: matrix products and attention, including recomputation.
        elementwise: operations between them.
        bubble: idle time of pipeline stages.
        communication: communication that does not overlap.
        optimizer: Adam.
        host: time in which the host launches all kernels, ahead of the device.
        mfu: fraction of peak used by the model's operations, without recomputation.
    """

    products: float
    elementwise: float
    bubble: float
    communication: float
    optimizer: float
    host: float
    mfu: float

    @property
    def total(self) -> float:
        """Time of the device, or of the host if the device waits for it."""
        return max(self.device, self.host)

    @property
    def device(self) -> float:
        """Sum of the device's parts."""
        return self.products + self.elementwise + self.bubble + self.communication + self.optimizer


def bubble_fraction(pipeline_size: int, num_micro_batches: int) -> float:
    """Return the ratio of idle to busy time, (p - 1)/m.

    "Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM", section 2.2.
    """
    return (pipeline_size - 1) / num_micro_batches


def step_time(
    shape: ModelShape, layout: Layout, cluster: Cluster, traffic: Iterable[Transfer]
) -> StepTime:
    """Estimate an optimizer step of the slowest stage."""
    images = layout.micro_batch_size * layout.accumulation_steps
    # Work of the busiest stage; embedding and head are spread over the blocks.
    share = shape.layers.busiest(layout.pipeline).share / layout.tensor
    own = images * share * shape.flops / layout.context
    products = own * _recomputed_passes(layout) / _speed(shape, layout, cluster)
    elementwise = images * _elementwise(shape, layout, cluster)
    shown, hidden, ends = _communication(traffic, cluster)
    busy = products + elementwise
    exposed = max(hidden - busy, _FELT * hidden)
    bubble = bubble_fraction(layout.pipeline, layout.accumulation_steps) * (busy + shown)
    time = StepTime(
        products=products,
        elementwise=elementwise,
        bubble=bubble,
        communication=shown + exposed + ends,
        optimizer=_optimizer(shape, layout, cluster),
        host=_host(shape, layout),
        mfu=0.0,
    )
    whole = shape.flops * images * layout.data
    peak = cluster.peak(shape.number_size, shape.fp8_share) * layout.num_processes
    return replace(time, mfu=whole / time.total / peak)


def _host(shape: ModelShape, layout: Layout) -> float:
    """Return the seconds in which the host launches the kernels of a step."""
    blocks = sum(count for _, count in shape.busiest_blocks(layout))
    return (
        _recomputed_passes(layout)
        * blocks
        * layout.accumulation_steps
        * _HOST_BLOCK[layout.zero_stage]
    )


def _recomputed_passes(layout: Layout) -> float:
    """Return the ratio of executed to counted operations."""
    return 4 / 3 if layout.parallel.activation_checkpointing == "full" else 1.0


def _speed(shape: ModelShape, layout: Layout, cluster: Cluster) -> float:
    """Return the FLOP/s that matrix products of these sizes reach."""
    stack = shape.main_stack
    rows = layout.micro_batch_size * stack.work.num_tokens / stack.context_parts(layout)
    columns = stack.hidden_size / layout.tensor
    share = _PRODUCT_SHARE * rows / (rows + _HALF_ROWS) * columns / (columns + _HALF_COLUMNS)
    return share * cluster.peak(shape.number_size, shape.fp8_share)


def _elementwise(shape: ModelShape, layout: Layout, cluster: Cluster) -> float:
    """Return the seconds per image of element-wise operations, bound by memory bandwidth."""
    plain = layout.parallel.model_copy(update={"activation_checkpointing": "none"})
    plainly = replace(layout, parallel=plain)
    touched = 0.0
    for stack, count in shape.busiest_blocks(layout):
        kept, whole = (block_activations(stack.in_bf16, each).total for each in (layout, plainly))
        touched += count * (_TOUCHES * whole + _TOUCHES_AGAIN * (whole - kept))
    again = _recomputed_passes(layout)
    return again * touched / (_MEMORY_SHARE * 1e9 * cluster.device.memory_gb_per_s)


def _communication(traffic: Iterable[Transfer], cluster: Cluster) -> tuple[float, float, float]:
    """Return seconds of communication in the passes, its overlapped part, and after the passes."""
    device = cluster.device
    shown = hidden = ends = 0.0
    for transfer in traffic:
        seconds = transfer.calls * _LATENCY
        seconds += transfer.inside / (_LINK_SHARE * 1e9 * device.node_gb_per_s)
        seconds += transfer.between / (_LINK_SHARE * 1e9 * device.network_gb_per_s)
        if transfer.is_hidden:
            hidden += seconds
        elif transfer.in_passes or transfer.kind.startswith(("tensor", "context", "pipeline")):
            shown += seconds
        else:
            ends += seconds
    return shown, hidden, ends


def _optimizer(shape: ModelShape, layout: Layout, cluster: Cluster) -> float:
    """Return the seconds of Adam, which reads and writes all states including the EMA."""
    states = 12 + 4 * shape.keeps_average
    own = parameters_held(shape.layers, layout) / (layout.replicas if layout.zero_stage else 1)
    if layout.parallel.offload_optimizer == "none":
        speed = _MEMORY_SHARE * 1e9 * cluster.device.memory_gb_per_s
        return own * 2 * (4 + states + shape.number_size) / speed
    moved = own * (4 + shape.number_size) / _PCIE
    return (
        moved
        + own * 2 * (4 + states) * min(cluster.devices_per_node, layout.num_processes) / _CPU_MEMORY
    )
