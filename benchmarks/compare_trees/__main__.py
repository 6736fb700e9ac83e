"""Run two checkouts on this machine and report differences.

    python -m benchmarks.compare_trees OLD_TREE NEW_TREE --only 'igpt*' presets refusals

Losses, gradient norms, sequences, parameters and their options, features, outputs, samples with
every option, evaluation, plans, schema, resolved presets, refusals, and resuming from the old
tree's checkpoints are compared bit for bit, times as ratios. Exit code 1 if anything differs
that `--allow` does not list.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from benchmarks.compare_trees import records
from benchmarks.compare_trees.cases import CASES, LAYOUTS
from benchmarks.compare_trees.report import (
    Allowed,
    Difference,
    differences,
    lines_of,
    ratios,
    read_allowed,
)
from megavis.parallel.launch import free_port

_OURS = Path(__file__).parents[1]
_WITHOUT_RUN = ("schema", "refusals", "presets")
_MAX_JOBS = 24
"""Trainings after which a process is replaced, since each engine leaks threads."""


class Recorder:
    """A process that measures in one checkout."""

    def __init__(self, tree: Path, folder: Path, rank: int = 0) -> None:
        """Start a process that imports the checkout.

        Args:
            tree: the checkout.
            folder: for its recordings.
            rank: of the process among those of a layout.
        """
        self._folder, self._jobs, self._rank = folder, 0, rank
        staged = folder / "tree"
        staged.mkdir(parents=True, exist_ok=True)
        # Use this tree's benchmarks for both: an old tree may not have them.
        targets = {name: tree / name for name in ("megavis", "data_tools", "yaml_configs")}
        for name, target in {**targets, "benchmarks": _OURS}.items():
            if not (staged / name).is_symlink():
                (staged / name).symlink_to(target.resolve())
        self._start()

    def _start(self) -> None:
        environment = {**os.environ, "PYTHONPATH": str(self._folder / "tree")}
        environment["OMP_NUM_THREADS"] = "1"
        self._log = (self._folder / f"log-{self._rank}.txt").open("a")
        self._process = subprocess.Popen(  # noqa: S603 - ourselves
            [sys.executable, "-m", "benchmarks.compare_trees.record"],
            cwd=self._folder,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
        )

    def send(self, case: str, part: str, **more: int) -> None:
        """Start a job."""
        if self._jobs == _MAX_JOBS:
            self.close()
            self._start()
            self._jobs = 0
        self._jobs += 1
        assert self._process.stdin is not None
        job = {"case": case, "part": part, **more}
        self._process.stdin.write(json.dumps(job) + "\n")
        self._process.stdin.flush()

    def wait(self) -> str:
        """Wait for the job; return the error, if any."""
        assert self._process.stdout is not None
        answer = self._process.stdout.readline()
        if not answer:
            return f"the process ended; see {self._log.name}"
        error: str = json.loads(answer)
        return error

    def measure(self, case: str, part: str) -> records.Record:
        """Run a job; return its record, which may be a failure."""
        self.send(case, part)
        return self.result(case, part, self.wait())

    def result(self, case: str, part: str, error: str) -> records.Record:
        """Return the record of a job that has ended."""
        if error:
            return {f"{part}/failed": f"{error}see {self._log.name}"}
        return records.read(self._folder / "records" / f"{case}-{part}")

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()
        self._log.close()


class Comparison:
    """Counts and prints differences."""

    def __init__(self, allowed: Sequence[Allowed]) -> None:
        self._allowed = allowed
        self.wrong = 0
        self._ratios: dict[str, list[float]] = {"step": [], "sample": []}

    def add(self, case: str, part: str, old: records.Record, new: records.Record) -> None:
        """Compare two records and print what differs."""
        found = differences(case, old, new)
        failed = f"{part}/failed"
        if failed in old and failed in new:
            # A failure is a difference, even if both failed.
            found = [Difference(f"{case}/{failed}", old[failed].strip())]
        lines, wrong = lines_of(found, self._allowed)
        self.wrong += wrong
        times = ratios(old, new)
        for name, ratio in times.items():
            self._ratios["step" if name == "step" else "sample"].append(ratio)
        total = len({**old, **new}) - len(times)
        verdict = f"{total} measurements equal" if not found else f"{len(found)} of {total} differ"
        print(f"{case} {part}: {verdict}", *lines, sep="\n", flush=True)

    def finish(self) -> int:
        """Print the ratios of times; return the exit code."""
        for name, values in self._ratios.items():
            if values:
                print(
                    f"processor seconds a {name}, new / old: median {statistics.median(values):.3f}"
                    f" of {len(values)}, {min(values):.2f} to {max(values):.2f}"
                )
        print("equal" if not self.wrong else f"{self.wrong} differences")
        return 1 if self.wrong else 0


def compare(
    trees: Sequence[Path], out: Path, wanted: Sequence[str], comparison: Comparison
) -> None:
    """Compare all cases that run on one process.

    Args:
        trees: old and new checkout.
        out: folder for data, runs and records.
        wanted: names of cases, `schema`, `presets`, `refusals`.
        comparison: collects the records.
    """
    old, new = (Recorder(tree, out / name) for tree, name in zip(trees, _SIDES, strict=True))
    try:
        _make_data(old, out)
        for name in wanted:
            parts = (name,) if name in _WITHOUT_RUN else ("fresh", "loaded")
            for part in parts:
                comparison.add(name, part, old.measure(name, part), new.measure(name, part))
    finally:
        old.close()
        new.close()


_SIDES = ("old", "new")


def _make_data(old: Recorder, out: Path) -> None:
    if (out / "data" / "made").exists():
        return
    shutil.rmtree(out / "data", ignore_errors=True)
    old.send("all", "data")
    if error := old.wait():
        raise SystemExit(f"the old tree cannot make the data:\n{error}")
    (out / "data" / "made").touch()


def compare_layouts(
    trees: Sequence[Path], out: Path, wanted: Sequence[str], comparison: Comparison
) -> None:
    """Compare curves in layouts of several processes; for arguments see `compare`."""
    runs = [(case.name, part) for case in CASES if case.layouts for part in LAYOUTS]
    runs = [(name, part) for name, part in runs if name in wanted]
    found = []
    for tree, side in zip(trees, _SIDES, strict=True):
        ranks = [Recorder(tree, out / side, rank) for rank in range(4)]
        try:
            found.append([_in_layout(ranks, name, part) for name, part in runs])
        finally:
            for each in ranks:
                each.close()
    for (name, part), old, new in zip(runs, *found, strict=True):
        comparison.add(name, part, old, new)


def _in_layout(ranks: Sequence[Recorder], name: str, part: str) -> records.Record:
    used, port = ranks[: LAYOUTS[part][0]], free_port()
    for rank, each in enumerate(used):
        each.send(name, part, rank=rank, port=port)
    errors = [error for each in used if (error := each.wait())]
    return ranks[0].result(name, part, "".join(errors[:1]))


def main() -> int:
    """Compare the trees; return 1 if anything differs."""
    names = [*_WITHOUT_RUN, *(case.name for case in CASES)]
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("old_tree", type=Path)
    parser.add_argument("new_tree", type=Path)
    parser.add_argument("--only", nargs="+", default=["*"], metavar="NAME", help=", ".join(names))
    parser.add_argument("--layouts", action="store_true", help="also on two and four processes")
    parser.add_argument("--allow", type=Path, metavar="FILE", help="lines of PATTERN # REASON")
    parser.add_argument("--out", type=Path, help="folder to keep data and runs in, for reuse")
    options = parser.parse_args()
    wanted = [name for name in names if any(fnmatch.fnmatch(name, p) for p in options.only)]
    if not wanted:
        parser.error(f"--only names none of {', '.join(names)}")
    comparison = Comparison(read_allowed(options.allow) if options.allow else [])
    trees = [options.old_tree, options.new_tree]
    with tempfile.TemporaryDirectory() as temporary:
        out = (options.out or Path(temporary)).resolve()
        for side in _SIDES:
            shutil.rmtree(out / side, ignore_errors=True)
        compare(trees, out, wanted, comparison)
        if options.layouts:
            compare_layouts(trees, out, wanted, comparison)
    return comparison.finish()


if __name__ == "__main__":
    sys.exit(main())
