"""`megavis bench`: time a training step by part."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator

from megavis.data.format.files import to_json
from megavis.parallel.launch import read_launch
from megavis.training.bench import BenchResult, bench


def time_step(args: argparse.Namespace) -> int:
    """Measure on every process of a job, and print on the main one."""
    result = bench(
        args.loaded.config,
        read_launch(os.environ),
        num_steps=args.steps,
        device=args.device,
        trace=args.profile,
    )
    if result is None:
        return 0
    lines = [to_json(result.as_json(), indent=2)] if args.json else _bench_lines(result)
    sys.stdout.write("".join(f"{line}\n" for line in lines))
    return 0


def _bench_lines(result: BenchResult) -> Iterator[str]:
    yield (
        f"{result.num_processes} × {result.device}, {result.layout}, {result.precision}, batch"
        f" {result.batch_size}, micro-batch {result.micro_batch_size}"
    )
    yield _bench_line(
        "step", f"{result.step_seconds:.4g} s, enqueued by the host in {result.host_seconds:.4g} s"
    )
    yield _bench_line(
        "throughput",
        f"{result.images_per_second:,.4g} images/s, {result.tokens_per_second:,.0f} tokens/s",
    )
    yield _bench_line("per device", _utilization(result))
    yield _bench_line("memory", f"{result.memory_gb:.3g} GB at most")
    shares = sorted(result.parts.items(), key=lambda part: -part[1])
    yield _bench_line("time", ", ".join(f"{name} {share:.0%}" for name, share in shares))
    if result.num_processes > 1:
        lag = result.slowest_seconds / result.step_seconds - 1
        yield _bench_line("slowest process", f"rank {result.slowest_rank}, {lag:.1%} over the mean")


def _utilization(result: BenchResult) -> str:
    rate = result.tflops_per_device
    if rate is None:
        return (
            "unknown: the discriminator's and the perceptual network's operations are not counted;"
            f" a matrix product achieves {result.product_tflops:.4g} TFLOP/s"
        )
    text = (
        f"{rate:.4g} TFLOP/s, {rate / result.product_tflops:.1%} of a matrix product's"
        f" {result.product_tflops:.4g}"
    )
    if result.peak_tflops is not None:
        text += f", {rate / result.peak_tflops:.1%} (MFU) of the vendor's {result.peak_tflops:.4g}"
    return text


def _bench_line(name: str, text: str) -> str:
    return f"  {name:<17}{text}"
