"""`megavis parity`: compare every layout with a single process."""

from __future__ import annotations

import argparse
import functools
import sys

from tqdm import tqdm

from megavis.config.errors import UserError
from megavis.config.schema import RunConfig
from megavis.config.section import ParallelConfig
from megavis.data.format.files import write_json
from megavis.planning.layouts import (
    layout_called,
    layout_issues,
    layout_name,
    legal_layouts,
    with_layout,
)
from megavis.training.parity import Noise, ParityResult, compare_layouts, parity_config


def check_parity(args: argparse.Namespace) -> int:
    """Compare; return 1 if any layout fails."""
    loaded = args.loaded
    config = parity_config(loaded.config)
    layouts = _chosen_layouts(args.layouts, config, args.processes)
    _print_row("layout", "loss", "allowed", "grad norm", "allowed", "")
    comparisons = compare_layouts(
        config,
        layouts,
        num_processes=args.processes,
        steps=args.steps,
        tolerance=args.tolerance,
        device=args.device,
        report_noise=functools.partial(_print_noise, tolerance=args.tolerance),
        report=_print_comparison,
    )
    failed = sum(not comparison.passed for comparison in comparisons)
    sys.stdout.write(f"{len(comparisons) - failed} passed, {failed} failed\n")
    if args.json:
        write_json(args.json, [comparison.as_json() for comparison in comparisons])
    return 1 if failed else 0


def _chosen_layouts(words: str, config: RunConfig, num_processes: int) -> list[ParallelConfig]:
    """Return the layouts of `--layouts`.

    Raises:
        UserError: a name is not a layout's, or the config checks refuse it; gives their reasons.
    """
    if words not in ("all", "everything"):
        chosen = [layout_called(name.strip()) for name in words.split(",")]
        for parallel in chosen:
            _require_legal(with_layout(config, parallel), num_processes)
        return chosen
    chosen = [
        parallel
        for parallel in legal_layouts(config, num_processes)
        if words == "everything"
        or not (parallel.sequence_parallel or parallel.activation_checkpointing != "none")
    ]
    if not chosen:
        # Comparing nothing is not a success: say why the plainest layout is refused.
        _require_legal(config, num_processes)
    return chosen


def _require_legal(config: RunConfig, num_processes: int) -> None:
    issues = layout_issues(config, num_processes)
    if issues:
        name = layout_name(config.parallel)
        raise UserError("\n".join(f"--layouts {name}: {key}: {text}" for key, text in issues))


def _print_noise(noise: Noise, tolerance: float) -> None:
    """Print how far one process is from itself if weights change in their last bit."""
    loss, norm = noise.loss[-1], noise.gradient_norm[-1]
    _print_row("one process, last bits changed", f"{loss:.1e}", "", f"{norm:.1e}", "", "")
    if max(loss, norm) > tolerance:
        first = 1 + next(
            i
            for i, pair in enumerate(zip(noise.loss, noise.gradient_norm, strict=True))
            if max(pair) > tolerance
        )
        tqdm.write(
            f"from step {first} on, rounding alone makes more than {tolerance:.0e}, since this"
            " training amplifies it: each step of a layout is compared with what rounding has made"
            " by then; for a stricter comparison use fewer --steps, schedule.warmup_steps, or a"
            " lower optimizer.learning_rate",
            sys.stdout,
        )


def _print_comparison(comparison: ParityResult) -> None:
    _print_row(
        comparison.layout,
        f"{comparison.loss_difference:.1e}",
        f"{comparison.loss_tolerance:.0e}",
        f"{comparison.gradient_norm_difference:.1e}",
        f"{comparison.gradient_norm_tolerance:.0e}",
        "pass" if comparison.passed else "FAIL",
    )
    if comparison.error:
        tqdm.write(comparison.error, sys.stdout)


def _print_row(layout: str, *columns: str) -> None:
    # Written above the progress bar, if there is one.
    *numbers, verdict = columns
    row = f"{layout:<30} {' '.join(f'{number:>9}' for number in numbers)}  {verdict}"
    tqdm.write(row.rstrip(), sys.stdout)
    sys.stdout.flush()
