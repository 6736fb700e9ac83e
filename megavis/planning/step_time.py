"""Estimate the time of an optimizer step.

Estimates are accurate enough to rank layouts. A step has matrix products at a fraction of the
device's peak, element-wise operations at a fraction of its memory bandwidth, the pipeline bubble,
and communication that does not overlap. The host's time is measured (`host_time.py`), bytes and
operations are counted, and all fractions are assumptions in this file, unless `gpu_check` has
measured them on the machine; none has been fitted to megavis on a GPU.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from megavis.planning.activations import ModelActivations
from megavis.planning.communication import Transfer
from megavis.planning.devices import Cluster
from megavis.planning.host_time import host_time
from megavis.planning.layouts import Layout, layout_key
from megavis.planning.parameters import PipelineStage
from megavis.planning.shape import ModelShape
from megavis.planning.states import FLOAT32, parameters_held

# Fraction of peak that a large matrix product reaches, and the sizes at which it reaches half of
# that: rows (tokens of a micro-batch) and columns (of this process's part of a matrix).
_PRODUCT_SHARE, _HALF_ROWS, _HALF_COLUMNS = 0.7, 256.0, 128.0
# Fraction of peak of links and of memory; latency of a collective in seconds.
_LINK_SHARE, _MEMORY_SHARE, _LATENCY = 0.8, 0.7, 20e-6
# Memory accesses per saved activation: written once, read by the next operation and in the backward
# pass; its gradient is written and read.
_TOUCHES = 5.0
# For each activation that `selective` frees: read the input, write the output, copy it into place.
_TOUCHES_AGAIN = 4.0
# Slowdown of computation, as a fraction of the communication that overlaps with it.
_FELT = 0.1
# Seconds of the host per collective; blocks were measured without tensor and context parallelism.
_HOST_CALL = 20e-6
# Offloaded states: bytes/s between GPU and CPU, and of a node's memory during Adam.
_PCIE, _CPU_MEMORY = 20e9, 150e9


@dataclass(frozen=True)
class StepTime:
    """Seconds per optimizer step by kind, and the resulting MFU.

    Attributes:
        products: matrix products and attention, including recomputation.
        elementwise: operations between them.
        encoding: frozen networks that encode images, in float32.
        bubble: idle time of pipeline stages.
        communication: communication that does not overlap with computation (exposed).
        overlapped: communication that does, which the total leaves out.
        optimizer: Adam.
        host: time in which the host launches all kernels, ahead of the device.
        host_block: host time per block and micro-batch without collectives, of the slowest blocks.
        host_source: source of this number.
        mfu: fraction of peak used by the model's operations, without recomputation.
    """

    products: float
    elementwise: float
    encoding: float
    bubble: float
    communication: float
    overlapped: float
    optimizer: float
    host: float
    host_block: float
    host_source: str
    mfu: float

    @property
    def total(self) -> float:
        """Time of the device, or of the host if the device waits for it."""
        return max(self.device, self.host)

    @property
    def waits_for_host(self) -> bool:
        """Whether the host bounds the step."""
        return self.host > self.device

    @property
    def device(self) -> float:
        """Sum of the device's parts."""
        passes = self.products + self.elementwise + self.encoding + self.bubble
        return passes + self.communication + self.optimizer


def bubble_fraction(pipeline_size: int, num_micro_batches: int) -> float:
    """Return the ratio of idle to busy time, (p - 1)/m.

    "Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM", section 2.2.
    """
    return (pipeline_size - 1) / num_micro_batches


def step_time(
    shape: ModelShape, layout: Layout, cluster: Cluster, traffic: Iterable[Transfer]
) -> StepTime:
    """Estimate an optimizer step of the slowest stage."""
    traffic, images = list(traffic), layout.micro_batch_size * layout.accumulation_steps
    blocks = [
        (
            host_time(
                carries=stack.carries, zero_stage=layout.zero_stage, measured=cluster.measured
            ),
            count,
        )
        for stack, count in shape.busiest_blocks(layout)
    ]
    slowest = max((known for known, _ in blocks), key=lambda known: known.seconds)
    # Work of the busiest stage; embedding and head are spread over the blocks.
    share = shape.layers.busiest(layout.pipeline).share / layout.tensor
    own = images * share * shape.flops / layout.context
    # A head of fine-tuning recomputes nothing, and each process of a tensor group runs all of it.
    own = own * _recomputed_passes(layout) + images * shape.head_flops
    products = own / _speed(shape, layout, cluster)
    elementwise = images * _elementwise(shape, layout, cluster)
    shown, hidden, ends = _communication(traffic, cluster)
    busy = products + elementwise
    exposed = max(hidden - busy, _FELT * hidden)
    encoding = images * _encoding(shape, cluster)
    waited = busy + encoding + shown
    bubble = bubble_fraction(layout.pipeline, layout.accumulation_steps) * waited
    time = StepTime(
        products=products,
        elementwise=elementwise,
        encoding=encoding,
        bubble=bubble,
        communication=shown + exposed + ends,
        overlapped=hidden - exposed,
        optimizer=_optimizer(shape, layout, cluster),
        host=_host(sum(known.seconds * count for known, count in blocks), layout, traffic),
        host_block=slowest.seconds,
        host_source=slowest.source,
        mfu=0.0,
    )
    whole = shape.total_flops * images * layout.data
    peak = cluster.peak(shape.number_size, shape.fp8_share) * layout.num_processes
    return replace(time, mfu=whole / time.total / peak)


def _host(blocks: float, layout: Layout, traffic: Iterable[Transfer]) -> float:
    """Return the seconds of the host in a step: `blocks` for each micro-batch, and collectives."""
    launched = _recomputed_passes(layout) * layout.accumulation_steps * blocks
    split = ("tensor", "context", "pipeline")
    return launched + _HOST_CALL * sum(
        each.calls for each in traffic if each.kind.startswith(split)
    )


def _recomputed_passes(layout: Layout) -> float:
    """Return the ratio of executed to counted operations."""
    return 4 / 3 if layout.parallel.activation_checkpointing == "full" else 1.0


def _speed(shape: ModelShape, layout: Layout, cluster: Cluster) -> float:
    """Return the FLOP/s that matrix products of these sizes reach."""
    stack = shape.main_stack
    rows = layout.micro_batch_size * stack.work.num_tokens / stack.context_parts(layout)
    columns = stack.hidden_size / layout.tensor
    share = rows / (rows + _HALF_ROWS) * columns / (columns + _HALF_COLUMNS)
    return share * _product_share(cluster) * cluster.peak(shape.number_size, shape.fp8_share)


def _product_share(cluster: Cluster) -> float:
    """Return the fraction of peak that a large product reaches: measured, or assumed."""
    measured = cluster.measured and cluster.measured.bf16_tflops
    return measured / cluster.device.bf16_tflops if measured else _PRODUCT_SHARE


def _memory_speed(cluster: Cluster) -> float:
    """Return the bytes per second of element-wise operations: a measured copy's, or assumed."""
    measured = cluster.measured and cluster.measured.memory_gb_per_s
    return 1e9 * (measured or _MEMORY_SHARE * cluster.device.memory_gb_per_s)


def _elementwise(shape: ModelShape, layout: Layout, cluster: Cluster) -> float:
    """Return the seconds per image of element-wise operations, bound by memory bandwidth."""
    stage, touched = shape.layers.busiest(layout.pipeline), 0.0
    key = layout_key(layout.parallel)
    both = (shape.activations[each] for each in (key, (*key[:3], "none")))
    for kept, whole in zip(*(_busiest(each, stage, shape) for each in both), strict=True):
        touched += _TOUCHES * whole + _TOUCHES_AGAIN * (whole - kept)
    again = _recomputed_passes(layout)
    return again * touched / _memory_speed(cluster)


def _busiest(
    measured: ModelActivations, stage: PipelineStage, shape: ModelShape
) -> Iterator[float]:
    """Yield the bytes per image saved in the blocks of each stack, and in a head with networks."""
    for stack, count in zip(measured.stacks, stage.blocks, strict=True):
        yield count * stack.mean_saved
    has_work = shape.decoder is not None or measured.head_flops > 0
    yield measured.head.saved * (has_work and stage.is_last)


def _encoding(shape: ModelShape, cluster: Cluster) -> float:
    """Return the seconds per image of frozen networks, which tensor parallelism does not split."""
    speed = _product_share(cluster) * cluster.peak(FLOAT32)
    memory = _memory_speed(cluster)
    return sum(each.flops / speed + each.touched / memory for each in shape.frozen)


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
    # Master weight and two moments in float32; a float32 gradient is added below.
    states = 12 + 4 * shape.keeps_average
    own = parameters_held(shape.trained, layout) / (layout.replicas if layout.zero_stage else 1)
    if layout.parallel.offload_optimizer == "none":
        return own * 2 * (4 + states + shape.number_size) / _memory_speed(cluster)
    moved = own * (4 + shape.number_size) / _PCIE
    return (
        moved
        + own * 2 * (4 + states) * min(cluster.devices_per_node, layout.num_processes) / _CPU_MEMORY
    )


def sources(time: StepTime, cluster: Cluster) -> dict[str, str]:
    """Return the source of each kind of number: measured, counted or assumed."""
    measured = cluster.measured
    on = f"measured on this {measured.device}" if measured else ""
    product, memory = f"{_product_share(cluster):.0%}", f"{_memory_speed(cluster) / 1e9:,.0f}"
    return {
        "host": f"{1e3 * time.host_block:.2g} ms a block and micro-batch,"
        f" {time.host_source}; {1e6 * _HOST_CALL:g} µs a collective, assumed",
        "operations, bytes, bubble": "counted",
        "products": f"{product} of peak,"
        f" {on if measured and measured.bf16_tflops else 'assumed'}; less for few rows or columns,"
        " assumed",
        "memory": f"{memory} GB/s, {on if measured and measured.memory_gb_per_s else 'assumed'}",
        "links": f"{_LINK_SHARE:.0%} of peak, {1e6 * _LATENCY:g} µs a collective, and what"
        " overlaps: assumed",
    }
