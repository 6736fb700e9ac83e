"""`megavis parity`: check every layout against a single process."""

from __future__ import annotations

import argparse
import sys
from typing import Any

from tqdm import tqdm

from megavis.config.errors import UserError
from megavis.config.parallel import ParallelConfig
from megavis.data.format.files import write_json
from megavis.planning.layouts import layout_name, legal_layouts
from megavis.training.parity import ParityResult, compare_layouts, parity_config


def run(args: argparse.Namespace) -> int:
    """Compare; return 1 if any layout fails."""
    loaded = args.loaded
    config = parity_config(loaded.config)
    layouts = _choose(args.layouts, config, args.processes)
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


def _choose(words: str, config: Any, num_processes: int) -> list[ParallelConfig]:
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
