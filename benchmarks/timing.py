"""Time contestants in turns, so that other load on the machine affects all of them alike."""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

_PACKAGES = ("torch", "deepspeed", "megatron-core", "transformers")


class Taken(NamedTuple):
    """Time of one round: wall-clock seconds, and CPU seconds of all threads.

    CPU time hardly depends on the machine's load; compare it with a single thread, since spinning
    threads count too.
    """

    wall: float
    cpu: float


def take_turns(
    contestants: Mapping[str, Callable[[], object]], *, rounds: int, warmup: int = 1
) -> dict[str, list[Taken]]:
    """Run each contestant once per round.

    Args:
        contestants: functions to time, by name.
        rounds: number of timed rounds.
        warmup: number of untimed rounds before.

    Returns:
        Each round's time, by name.
    """
    taken: dict[str, list[Taken]] = {name: [] for name in contestants}
    for number in range(warmup + rounds):
        for name, run in contestants.items():
            wall, cpu = time.perf_counter(), time.process_time()
            run()
            if number >= warmup:
                both = Taken(time.perf_counter() - wall, time.process_time() - cpu)
                taken[name].append(both)
    return taken


def ratio(slow: Sequence[float], fast: Sequence[float]) -> float:
    """Return the median over rounds of the ratio `slow` / `fast`."""
    return statistics.median(a / b for a, b in zip(slow, fast, strict=True))


def summary(taken: Mapping[str, Sequence[Taken]], *, against: str) -> list[dict[str, Any]]:
    """Return one row per contestant: medians, and the ratio to `against`."""
    base_wall, base_cpu = zip(*taken[against], strict=True)
    rows = []
    for name, rounds in taken.items():
        wall, cpu = zip(*rounds, strict=True)
        rows.append(
            {
                "name": name,
                "wall_s": statistics.median(wall),
                "cpu_s": statistics.median(cpu),
                "wall_times": ratio(wall, base_wall),
                "cpu_times": ratio(cpu, base_cpu),
            }
        )
    return rows


def parser(description: str) -> argparse.ArgumentParser:
    """Return a parser with the options of all benchmarks."""
    made = argparse.ArgumentParser(description=description)
    made.add_argument("--rounds", type=int, default=5, help="timed turns of each; default: 5")
    made.add_argument("--json", type=Path, metavar="FILE", help="also write the results here")
    return made


def report(rows: Sequence[Mapping[str, Any]], path: Path | None, **about: Any) -> None:
    """Print a table, and optionally write rows and machine as JSON.

    Args:
        rows: rows with equal keys.
        path: JSON file, or None.
        **about: sizes and settings.
    """
    facts = {**about, **machine()}
    print("  ".join(f"{key} {value}" for key, value in facts.items()))
    texts = [[_text(value) for value in row.values()] for row in [*rows]]
    table = [list(rows[0]), *texts]
    widths = [max(len(line[column]) for line in table) for column in range(len(table[0]))]
    for line in table:
        cells = zip(line, widths, strict=True)
        print("  ".join(cell.ljust(width) for cell, width in cells).rstrip())
    if path is not None:
        path.write_text(json.dumps({"about": facts, "rows": list(rows)}, indent=2) + "\n")


def machine() -> dict[str, str]:
    """Return date, cores, threads and versions."""
    versions = {}
    for package in _PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return {
        "date": datetime.date.today().isoformat(),
        "cores": str(os.cpu_count()),
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "unset"),
        "python": platform.python_version(),
        **versions,
    }


def need_transformers() -> None:
    """Exit with instructions if `transformers` is missing."""
    try:
        importlib.metadata.version("transformers")
    except importlib.metadata.PackageNotFoundError:
        sys.exit("this benchmark compares with transformers: pip install transformers")


def _text(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
