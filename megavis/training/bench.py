"""Measure training steps on random data: throughput, utilization, memory, and time by part.

Utilization is strict: operations are counted as in `megavis.model.flops` (the visible half of
causal attention, no recomputation, no embeddings) and compared with the vendor's dense peak and
with a matrix product of this model's size, measured in the same run. With `training.fp8` the peak
is that of the mixture: FP8 for products of the blocks with their weights, bf16 for all others.
"""

from __future__ import annotations

import itertools
import platform
import re
import resource
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from statistics import fmean, median
from typing import Any

import torch
from torch import Tensor
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from megavis.composition.model import model_of
from megavis.composition.tokens import Vocabulary
from megavis.composition.trainable import Trainable
from megavis.config.schema import RunConfig
from megavis.data.loading.loader import Batch
from megavis.model.flops import peak_flops
from megavis.papers import build_objective
from megavis.parallel.device import DTYPES
from megavis.parallel.launch import Launch
from megavis.parallel.progress_bar import shown
from megavis.parallel.workers import discarded_output
from megavis.planning.layouts import layout_name
from megavis.planning.measured_activations import activations_of_layouts
from megavis.training.engine import Engine
from megavis.training.job import open_job

WARM_UP = 3
"""Warm-up steps, not measured: they compile, choose kernels and fill caches."""
_NUM_PROFILED = 2
_NUM_BATCHES = 4
_SHORTEST = 0.2
"""Seconds of timed matrix products."""
_REST = "the rest: norms, activations, losses, Python"

PARTS: Mapping[str, str] = {
    "communication": r"nccl|gloo|c10d|all_?reduce|all_?gather|reduce_?scatter|broadcast_",
    # Before matrix products, whose pattern also matches attention's kernels (`fmha_cutlassF_...`).
    # Inductor generates FlexAttention from a template (`triton_tem_...`).
    "attention": r"flash|fmha|sdpa|attention|efficient_attn|triton_tem_",
    "matrix products": r"gemm|gemv|nvjet|cutlass|xmma|(^|::)(add|b|ba)*mm(_|$)|linear|conv",
    "optimizer": r"adam|lamb|lars|muon|multi_tensor|foreach",
    "copies": r"memcpy|memset|copy_|::cat|clone|contiguous",
}
"""Name patterns of the operators or kernels of each part; the first match counts."""


@dataclass(frozen=True)
class BenchResult:
    """Measurements of a config's training steps; rates are of the whole job.

    Attributes:
        device: device name.
        num_processes: processes of the job.
        layout: short name of the layout.
        precision: compute precision.
        batch_size: images per step.
        micro_batch_size: images per micro-batch and process.
        step_seconds: mean over consecutive steps without synchronization.
        slowest_seconds: the same for the slowest process.
        slowest_rank: rank of that process.
        host_seconds: time to enqueue a step; if close to `step_seconds`, the device is idle.
        images_per_second: throughput.
        tokens_per_second: throughput in tokens.
        tflops_per_device: operations per second, in 10¹²; None if only some of a step's are
            counted (`Trainable.counts_whole_step`).
        product_tflops: the same for a matrix product of this size.
        peak_tflops: the vendor's peak, of the mixture with `training.fp8`; None if unknown.
        memory_gb: peak memory allocated on the device; on a CPU, the peak of the process.
        parts: fraction of the device's time by part; they sum to 1.
    """

    device: str
    num_processes: int
    layout: str
    precision: str
    batch_size: int
    micro_batch_size: int
    step_seconds: float
    slowest_seconds: float
    slowest_rank: int
    host_seconds: float
    images_per_second: float
    tokens_per_second: float
    tflops_per_device: float | None
    product_tflops: float
    peak_tflops: float | None
    memory_gb: float
    parts: Mapping[str, float]

    def as_json(self) -> dict[str, Any]:
        """Return the result as JSON."""
        return asdict(self)


def bench(
    config: RunConfig,
    launch: Launch,
    *,
    num_steps: int,
    device: str | None = None,
    trace: Path | None = None,
) -> BenchResult | None:
    """Measure the steps of a config. Collective over all processes of the job.

    Args:
        launch: this process's place in the job.
        device: `cpu` or `cuda`; default: the best available.
        trace: file for the main process's trace, in Chrome's format.

    Returns:
        The result on the main process, None on the others.
    """
    head = _head_flops(config)
    with open_job(config, launch, device=device) as context:
        objective = build_objective(config, context)
        engine = Engine(objective)
        clock = _Clock(context.device)
        step = _stepper(engine, context.device)
        _repeat(step, WARM_UP)
        clock.start()
        taken = clock.seconds(lambda: _repeat(step, num_steps)) / num_steps
        # Read before the profiler and the timed product, whose memory does not belong to training.
        memory = clock.peak_memory()
        host = median(clock.host_seconds(step) for _ in range(3))
        parts = _parts(step, context.device, trace if context.is_main else None)
        rows = engine.micro_batch_size * objective.backbone.num_tokens
        product = _product_rate(
            clock, context.device, DTYPES[config.training.precision], rows, config.model.hidden_size
        )
        seconds = context.gather(taken)
        if not context.is_main:
            return None
        mean, rate = fmean(seconds), config.training.batch_size / fmean(seconds)
        flops = _flops_per_image(objective, head)
        peak = peak_flops(clock.name, config.training.precision, objective.fp8_share())
        return BenchResult(
            device=clock.name,
            num_processes=context.world.size,
            layout=layout_name(config.parallel),
            precision=config.training.precision,
            batch_size=config.training.batch_size,
            micro_batch_size=engine.micro_batch_size,
            step_seconds=mean,
            slowest_seconds=max(seconds),
            slowest_rank=seconds.index(max(seconds)),
            host_seconds=host,
            images_per_second=rate,
            tokens_per_second=rate * objective.backbone.num_tokens,
            tflops_per_device=None if flops is None else rate * flops / context.world.size / 1e12,
            product_tflops=product / 1e12,
            peak_tflops=None if peak is None else peak / 1e12,
            memory_gb=memory / 1e9,
            parts=parts,
        )


def _head_flops(config: RunConfig) -> float:
    """Return the operations of the head of fine-tuning per image; no context may be open."""
    ways = {} if config.finetune is None else activations_of_layouts([config])
    return max((way.head_flops for way in ways.values()), default=0.0)


def _flops_per_image(objective: Trainable, head: float) -> float | None:
    """Return the operations of a step per image; None if large parts of it are not counted."""
    if objective.counts_whole_step or head:
        return objective.flops_per_image() + head
    return None


class _Clock:
    """Times work on a device; only CUDA needs synchronization."""

    def __init__(self, device: torch.device) -> None:
        self._is_cuda = device.type == "cuda"
        self.name = torch.cuda.get_device_name(device) if self._is_cuda else processor_name()

    def wait(self) -> None:
        if self._is_cuda:
            torch.cuda.synchronize()

    def start(self) -> None:
        """Reset the memory peak."""
        self.wait()
        if self._is_cuda:
            torch.cuda.reset_peak_memory_stats()

    def seconds(self, work: Callable[[], object]) -> float:
        self.wait()
        began = time.perf_counter()
        work()
        self.wait()
        return time.perf_counter() - began

    def host_seconds(self, work: Callable[[], object]) -> float:
        """Return how long the host takes to enqueue work for an idle device."""
        self.wait()
        began = time.perf_counter()
        work()
        taken = time.perf_counter() - began
        self.wait()
        return taken

    def peak_memory(self) -> float:
        """Return the peak in bytes."""
        if self._is_cuda:
            return float(torch.cuda.max_memory_allocated())
        # Linux counts it in KiB.
        return 1024.0 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def processor_name() -> str:
    """Return the CPU's name."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def _stepper(engine: Engine, device: torch.device) -> Callable[[], object]:
    """Return a function that takes the next step, cycling through batches."""
    count = engine.micro_batch_size
    batches = [random_batch(engine.objective, count, seed=seed) for seed in range(_NUM_BATCHES)]
    if device.type == "cuda":
        batches = [batch.pin_memory() for batch in batches]
    stream: Iterator[Batch] = itertools.cycle(batches)
    steps = itertools.count()
    return lambda: engine.train_step(stream, next(steps))


def _repeat(step: Callable[[], object], count: int) -> None:
    for _ in shown(range(count), "steps", total=count, unit="step"):
        step()


def _parts(
    step: Callable[[], object], device: torch.device, trace: Path | None
) -> Mapping[str, float]:
    """Profile steps; return each part's fraction of the device's time."""
    activities = [ProfilerActivity.CPU]
    if device.type == "cuda":
        activities.append(ProfilerActivity.CUDA)
    profiler = profile(activities=activities)
    # From C++ it writes messages at start and end, among them an error without a GPU.
    with discarded_output(2):
        profiler.start()
    try:
        _repeat(step, _NUM_PROFILED)
        if device.type == "cuda":
            torch.cuda.synchronize()
    finally:
        with discarded_output(2):
            profiler.stop()
    if trace is not None:
        trace.parent.mkdir(parents=True, exist_ok=True)
        profiler.export_chrome_trace(str(trace))
    return shares(times_of(profiler, device))


def times_of(profiler: profile, device: torch.device) -> Iterator[tuple[str, float]]:
    """Yield the name and time of each kernel on a GPU, or of each operator on a CPU."""
    if device.type == "cuda":
        for event in profiler.events():
            # Operators count the time of their kernels again, and named ranges, such as the
            # optimizer's step, also the time between kernels.
            if event.device_type == DeviceType.CUDA and not event.is_user_annotation:
                yield event.name, event.time_range.elapsed_us()
    else:
        # An operator's total time includes the operators that it calls; its own time does not.
        for average in profiler.key_averages():
            yield average.key, average.self_cpu_time_total


def shares(times: Iterable[tuple[str, float]]) -> Mapping[str, float]:
    """Return the fraction of time of each part of `PARTS`, from times of operators or kernels."""
    totals: dict[str, float] = defaultdict(float)
    for name, taken in times:
        found = (part for part, words in PARTS.items() if re.search(words, name.lower()))
        totals[next(found, _REST)] += taken
    whole = sum(totals.values())
    return {part: totals[part] / whole for part in (*PARTS, _REST)}


def _product_rate(
    clock: _Clock, device: torch.device, dtype: torch.dtype, rows: int, width: int
) -> float:
    """Return the operations per second of the MLP's first product for a micro-batch."""
    left = torch.randn(rows, width, device=device, dtype=dtype)
    right = torch.randn(width, 4 * width, device=device, dtype=dtype)
    result = left @ right

    def multiply(count: int) -> None:
        for _ in range(count):
            torch.mm(left, right, out=result)

    operations, count = 2.0 * rows * width * 4 * width, 1
    while (taken := clock.seconds(partial(multiply, count))) < _SHORTEST:
        count *= 2
    return count * operations / taken


def random_batch(objective: Trainable, count: int, *, seed: int = 0) -> Batch:
    """Return a batch of `count` random samples on the CPU, in the form of the config's shards.

    Maps of classes are void, and objects are random rectangles of the first class.
    """
    blank = objective.blank_batch(count, torch.device("cpu"))
    generator = torch.Generator().manual_seed(seed)
    own = objective.backbone.blank_batch(count, torch.device("cpu"))
    inputs = _random_like(own.inputs, objective, generator)
    if blank.inputs.shape != own.inputs.shape:
        inputs = torch.stack([inputs, blank.inputs[:, 1]], dim=1)
    objects = blank.objects and (blank.objects[0], _rectangles(blank.objects[1], generator))
    return Batch(inputs, blank.labels, torch.arange(count), objects=objects)


def _rectangles(masks: Tensor, generator: torch.Generator) -> Tensor:
    """Return masks in the form of `Batch.objects`, each a random rectangle."""

    def between(size: int) -> Tensor:
        """Return which of `size` places lie between two random ones: bool `[b, k, size]`."""
        ends = torch.randint(size, (2, *masks.shape[:2], 1), generator=generator)
        places = torch.arange(size)
        return (ends.amin(0) <= places) & (places <= ends.amax(0))

    rows, columns = map(between, masks.shape[2:])
    return 255 * (rows[..., :, None] & columns[..., None, :]).to(torch.uint8)


def _random_like(blank: Tensor, objective: Trainable, generator: torch.Generator) -> Tensor:
    shape, dtype = tuple(blank.shape), blank.dtype
    if dtype == torch.uint8:
        return torch.randint(256, shape, generator=generator, dtype=dtype)
    if dtype == torch.int64:
        ids = model_of(objective).reads
        assert isinstance(ids, Vocabulary)
        return torch.randint(ids.vocabulary_size, shape, generator=generator)
    numbers = torch.randn(shape, generator=generator)
    if dtype == torch.float16:  # latents: means, then scales
        numbers[:, 1] = 0.1
    return numbers.to(dtype)
