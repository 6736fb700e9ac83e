"""How long an optimizer step takes: an estimate, good for ranking layouts.

Arithmetic at a share of the device's peak, element-wise work at the speed of its memory, the
bubble of the pipeline, and communication that cannot overlap with computation. The shares
are assumptions, all of them in this file; none has been fitted to megavis on a GPU.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from megavis.planning.activation_memory import block_activations
from megavis.planning.communication import Transfer
from megavis.planning.hardware import Cluster
from megavis.planning.layouts import Layout
from megavis.planning.shape import ModelShape, StackShape
from megavis.planning.states import parameters_held

# Share of its peak that a large matrix product reaches, and the sizes at which it reaches a half of
# that: rows (tokens of a micro-batch) and columns (of this process's part of a matrix).
_PRODUCT_SHARE, _HALF_ROWS, _HALF_COLUMNS = 0.7, 256.0, 128.0
# Share of a link's peak, and of the memory's, that is reached; seconds that a collective costs
# before its first byte.
_LINK_SHARE, _MEMORY_SHARE, _LATENCY = 0.8, 0.7, 20e-6
# A number that is kept for the backward pass is written once, read by the next operation and in the
# backward pass, and its gradient is written and read.
_TOUCHES = 5.0
# Hidden communication slows the arithmetic down a little: this share of it is felt.
_FELT = 0.1
# Offloaded states: GB/s between a GPU and its CPU, and of a node's memory under Adam.
_PCIE, _CPU_MEMORY = 20e9, 150e9


@dataclass(frozen=True)
class StepTime:
    """Seconds of an optimizer step, and what they come to.

    Attributes:
        products: matrix products and attention, with what is recomputed.
        elementwise: everything between them.
        bubble: idle stages at both ends of a step.
        communication: what the arithmetic waits for.
        optimizer: Adam.
        mfu: share of the peak that the model's own operations use, recomputation not counted.
    """

    products: float
    elementwise: float
    bubble: float
    communication: float
    optimizer: float
    mfu: float

    @property
    def total(self) -> float:
        """All of them."""
        return self.products + self.elementwise + self.bubble + self.communication + self.optimizer


def bubble_fraction(pipeline_size: int, num_micro_batches: int) -> float:
    """Return idle over busy time, (p - 1)/m.

    "Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM", section 2.2.
    """
    return (pipeline_size - 1) / num_micro_batches


def step_time(
    shape: ModelShape, layout: Layout, cluster: Cluster, traffic: Iterable[Transfer]
) -> StepTime:
    """Estimate an optimizer step of the slowest stage."""
    images = layout.micro_batch_size * layout.accumulation_steps
    # The share of the largest stage, in which embedding and head are not distinguished from blocks.
    share = shape.layers.busiest(layout.pipeline).share / layout.tensor
    own = images * share * shape.flops
    products = own * _with_recomputed(shape, layout) / _speed(shape, layout, cluster)
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
        mfu=0.0,
    )
    whole = shape.flops * images * layout.data
    peak = cluster.peak(shape.number_size) * layout.num_processes
    return replace(time, mfu=whole / time.total / peak)


def _with_recomputed(shape: ModelShape, layout: Layout) -> float:
    """Return operations that are done over those that count."""
    checkpointing = layout.parallel.activation_checkpointing
    if checkpointing == "full":
        return 4 / 3
    if checkpointing == "none":
        return 1.0
    scores = sum(
        4 * stack.hidden_size * stack.work.num_tokens * _keys(stack) * stack.num_layers
        for stack in (*shape.stacks, shape.decoder)
        if stack is not None
    )
    return 1.0 + scores / shape.flops


def _keys(stack: StackShape) -> float:
    """Return how many keys a query sees, on average."""
    return stack.work.mean_visible + stack.work.num_memory


def _speed(shape: ModelShape, layout: Layout, cluster: Cluster) -> float:
    """Return the operations a second that matrix products of these sizes reach."""
    stack = shape.main_stack
    rows = layout.micro_batch_size * stack.work.num_tokens
    columns = stack.hidden_size / layout.tensor
    share = _PRODUCT_SHARE * rows / (rows + _HALF_ROWS) * columns / (columns + _HALF_COLUMNS)
    return share * cluster.peak(shape.number_size)


def _elementwise(shape: ModelShape, layout: Layout, cluster: Cluster) -> float:
    """Return the seconds an image between matrix products, at the speed of the memory."""
    # What `selective` does not keep is written and read all the same.
    plain = layout.parallel.model_copy(update={"activation_checkpointing": "none"})
    plainly = replace(layout, parallel=plain)
    touched = sum(
        _TOUCHES * block_activations(stack, plainly).total * count
        for stack, count in shape.blocks_of(shape.layers.busiest(layout.pipeline))
    )
    again = 4 / 3 if layout.parallel.activation_checkpointing == "full" else 1.0
    return again * touched / (_MEMORY_SHARE * 1e9 * cluster.device.memory_gb_per_s)


def _communication(traffic: Iterable[Transfer], cluster: Cluster) -> tuple[float, float, float]:
    """Return seconds inside the passes, of those what overlaps with them, and at their end."""
    device = cluster.device
    shown = hidden = ends = 0.0
    for transfer in traffic:
        seconds = transfer.calls * _LATENCY
        seconds += transfer.inside / (_LINK_SHARE * 1e9 * device.node_gb_per_s)
        seconds += transfer.between / (_LINK_SHARE * 1e9 * device.network_gb_per_s)
        if transfer.is_hidden:
            hidden += seconds
        elif transfer.kind.startswith(("tensor", "pipeline")):
            shown += seconds
        else:
            ends += seconds
    return shown, hidden, ends


def _optimizer(shape: ModelShape, layout: Layout, cluster: Cluster) -> float:
    """Return the seconds of Adam, which reads and writes all states, the average among them."""
    states = 12 + 4 * shape.keeps_average
    own = parameters_held(shape.layers, layout) / (layout.data if layout.zero_stage else 1)
    if layout.parallel.offload_optimizer == "none":
        speed = _MEMORY_SHARE * 1e9 * cluster.device.memory_gb_per_s
        return own * 2 * (4 + states + shape.number_size) / speed
    moved = own * (4 + shape.number_size) / _PCIE
    return (
        moved
        + own * 2 * (4 + states) * min(cluster.devices_per_node, layout.num_processes) / _CPU_MEMORY
    )
