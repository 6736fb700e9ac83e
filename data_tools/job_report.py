"""Terminal output, reports and figures of the data tools."""

from __future__ import annotations

import io
import itertools
import sys
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tqdm import tqdm

from data_tools.engines import Failure
from data_tools.shard_tasks import UnitResult, peak_memory
from megavis.data.format.files import write_atomically, write_json

_SECONDS_BETWEEN_LINES = 10.0
_IMAGES_OF_A_FIGURE, _POINTS_OF_A_FIGURE = 10_000, 5


def say(text: str) -> None:
    """Print a line to standard output at once."""
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


class ProgressBar:
    """Progress on standard error: a bar on a terminal, a line every ten seconds in a log.

    `unit` is the plural name of the items, whose total is 0 if unknown.
    """

    def __init__(self, label: str, *, total: int, unit: str = "images") -> None:
        self._label, self._total, self._unit = label, total, unit
        self.done = 0
        self.errors = 0
        self._start = self._last_line = time.monotonic()
        self._bar = (
            tqdm(total=total or None, desc=label, unit=f" {unit}", leave=False, file=sys.stderr)
            if sys.stderr.isatty()
            else None
        )

    def fail(self, count: int) -> None:
        """Count skipped items; `advance` must be called for them too."""
        self.errors += count
        if self._bar is not None and count:
            self._bar.set_postfix(skipped=self.errors, refresh=False)

    def advance(self, count: int = 1) -> None:
        """Count finished items."""
        self.done += count
        if self._bar is not None:
            self._bar.update(count)
        elif time.monotonic() - self._last_line > _SECONDS_BETWEEN_LINES:
            self._last_line = time.monotonic()
            sys.stderr.write(self._line())

    def _line(self) -> str:
        line = f"{self._label}: {self.done}"
        if self._total:
            line += f" of {self._total}"
        line += f" {self._unit}, {self.rate:.0f} per second"
        if self.errors:
            line += f", {self.errors} skipped"
        if self._total and self.done:
            line += f", {(self._total - self.done) / self.rate / 60:.1f} minutes left"
        return line + "\n"

    @property
    def rate(self) -> float:
        """Items per second since the start."""
        return self.done / max(self.seconds, 1e-9)

    @property
    def seconds(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self._start

    def __enter__(self) -> ProgressBar:
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.close()


@dataclass
class JobOutcome:
    """Results of the finished units, in any order, and the failure that ended the job, if any."""

    results: list[UnitResult] = field(default_factory=list)
    failure: Failure | None = None
    seconds: float = 0.0

    @property
    def peak_memory(self) -> int:
        """Peak memory of any process in bytes."""
        return max([peak_memory(), *(result.peak_memory for result in self.results)])

    def memory_course(self, *, points: int = 100) -> list[tuple[int, int]]:
        """Return pairs of finished images and the peak memory of any process until then, in bytes.

        There is one entry per new shard, thinned to about `points`, including the last one.
        """
        made = [result for result in self.results if not result.was_there]
        images = itertools.accumulate(result.num_files for result in made)
        peaks = itertools.accumulate((result.peak_memory for result in made), max)
        course = list(zip(images, peaks, strict=True))
        step = -(-len(course) // points) or 1
        return course[::-1][::step][::-1]


def write_memory_figure(path: Path, outcome: JobOutcome) -> bool:
    """Plot memory over time, if the job was long enough; return whether it was. Raises OSError."""
    course = [(images, peak / 2**20) for images, peak in outcome.memory_course()]
    if len(course) < _POINTS_OF_A_FIGURE or course[-1][0] < _IMAGES_OF_A_FIGURE:
        return False
    memory = "most memory of a process so far (MiB)"
    write_atomically(path, line_figure(course, xlabel="images done", ylabel=memory))
    return True


def write_report(
    path: Path, outcome: JobOutcome, *, finished: Sequence[str] = ()
) -> dict[str, list[str]]:
    """Write the report of a job; return names of rejected files by reason. Raises OSError.

    There are at most a hundred names per shard and reason.

    Values under `measured` differ between runs; all others depend only on the images. Failed shards
    that exist, `finished`, are excluded.
    """
    results = outcome.results
    skipped: dict[str, list[str]] = defaultdict(list)
    for result in results:
        for reason, names in result.names.items():
            skipped[reason] += names
    report: dict[str, Any] = {
        "num_files": sum(result.num_files for result in results),
        "num_samples": sum(
            entry.num_samples for result in results if (entry := result.shards[0]) is not None
        ),
        "skipped": {reason: sorted(names) for reason, names in sorted(skipped.items())},
        "measured": {
            "seconds": round(outcome.seconds, 3),
            "peak_memory_bytes": outcome.peak_memory,
            "peak_memory_bytes_by_images": outcome.memory_course(),
        },
    }
    if outcome.failure is not None:
        # A killed worker may have finished a shard without reporting it.
        shards = [shard for shard in outcome.failure.shards if shard not in finished]
        report["unfinished"] = {"shards": shards, "reason": outcome.failure.reason}
        report["finished"] = list(finished)
    write_json(path, report)
    return report["skipped"]


def line_figure(
    points: Sequence[tuple[float, float]], *, xlabel: str, ylabel: str, doubling: bool = False
) -> bytes:
    """Plot y over x, at least one point, with y starting at zero; return the PNG.

    With `doubling` the x axis is logarithmic with a tick per point; else linear from zero.
    """
    # Imported here, since it is slow. Without pyplot, which would need a display.
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5, 3.5), layout="constrained")
    axes = figure.subplots()
    xs, ys = zip(*points, strict=True)
    axes.plot(xs, ys, marker="o", markersize=4, color="#1f5fa8")
    if doubling:
        axes.set_xscale("log", base=2)
        axes.set_xticks(xs, [str(x) for x in xs])
        axes.minorticks_off()
    else:
        axes.set_xlim(left=0)
        axes.xaxis.set_major_formatter("{x:,.0f}")
    axes.set_ylim(0, 1.1 * max(ys))
    axes.set_xlabel(xlabel)
    axes.set_ylabel(ylabel)
    axes.grid(alpha=0.3)
    content = io.BytesIO()
    figure.savefig(content, format="png", dpi=150)
    return content.getvalue()
