"""`megavis train`, `finetune`, `bench` and `parity`: take training steps."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator
from typing import Any

from tqdm import tqdm

from megavis.commands.terminal import quietly
from megavis.config.errors import UserError
from megavis.config.section import ParallelConfig
from megavis.data.format.files import to_json, write_json
from megavis.parallel.launch import read_launch
from megavis.planning.layouts import layout_name, legal_layouts
from megavis.training.bench import BenchResult, bench
from megavis.training.dry_run import dry_run
from megavis.training.parity import ParityResult, compare_layouts, parity_config
from megavis.training.trainer import run_training


def train(args: argparse.Namespace) -> int:
    """Train, or check whether training could start; return 2 if it could not."""
    if not args.dry_run:
        run_training(args.loaded, read_launch(os.environ), device=args.device)
        return 0
    with quietly():
        findings = list(dry_run(args.loaded, args.processes or 1))
    sys.stdout.writelines(f"{finding}\n" for finding in findings)
    return 0 if all(finding.is_right for finding in findings) else 2


def time_step(args: argparse.Namespace) -> int:
    """Measure on every process of a job, and print on the main one."""
    result = bench(
        args.loaded,
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
    text = (
        f"{rate:.4g} TFLOP/s, {rate / result.product_tflops:.1%} of a matrix product's"
        f" {result.product_tflops:.4g}"
    )
    if result.peak_tflops is not None:
        text += f", {rate / result.peak_tflops:.1%} (MFU) of the vendor's {result.peak_tflops:.4g}"
    return text


def _bench_line(name: str, text: str) -> str:
    return f"  {name:<17}{text}"


def check_parity(args: argparse.Namespace) -> int:
    """Compare; return 1 if any layout fails."""
    loaded = args.loaded
    config = parity_config(loaded.config)
    layouts = _chosen_layouts(args.layouts, config, args.processes)
    _print_row("layout", "loss", "grad norm", "tolerance", "")
    comparisons = compare_layouts(
        config,
        layouts,
        num_processes=args.processes,
        steps=args.steps,
        tolerance=args.tolerance,
        device=args.device,
        report=_print_comparison,
    )
    failed = sum(not comparison.passed for comparison in comparisons)
    sys.stdout.write(f"{len(comparisons) - failed} passed, {failed} failed\n")
    if args.json:
        write_json(args.json, [comparison.as_json() for comparison in comparisons])
    return 1 if failed else 0


def _chosen_layouts(words: str, config: Any, num_processes: int) -> list[ParallelConfig]:
    legal = {layout_name(parallel): parallel for parallel in legal_layouts(config, num_processes)}
    if words == "everything":
        return list(legal.values())
    if words == "all":
        return [
            parallel
            for parallel in legal.values()
            if not parallel.sequence_parallel and parallel.activation_checkpointing == "none"
        ]
    unknown = [name for name in words.split(",") if name not in legal]
    if unknown:
        raise UserError(
            f"--layouts: {', '.join(unknown)} is not legal for this config on {num_processes}"
            f" processes; legal layouts are {', '.join(legal)}"
        )
    return [legal[name] for name in words.split(",")]


def _print_comparison(comparison: ParityResult) -> None:
    _print_row(
        comparison.layout,
        f"{comparison.loss_difference:.1e}",
        f"{comparison.gradient_norm_difference:.1e}",
        f"{comparison.tolerance:.0e}",
        "pass" if comparison.passed else "FAIL",
    )
    if comparison.error:
        tqdm.write(comparison.error, sys.stdout)


def _print_row(layout: str, loss: str, norm: str, tolerance: str, verdict: str) -> None:
    # Written above the progress bar, if there is one.
    tqdm.write(f"{layout:<30} {loss:>10} {norm:>10} {tolerance:>10}  {verdict}", sys.stdout)
    sys.stdout.flush()
