"""Fraction of a training step spent waiting for data, in the real loop with real shards.

    OMP_NUM_THREADS=2 python -m benchmarks.loader

Palette shards of 32² pixels are made from scikit-image's photographs, unless `--shards` gives a
folder. Waiting is the time inside `next(loader)`. The second line shows how much CPU time the
reading threads take from training: it is the same step on a single batch in memory.
"""

from __future__ import annotations

import itertools
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.timing import report
from benchmarks.twins import run_config, sized_parser, sizes
from megavis.config.schema import RunConfig
from megavis.data.loading.loader import Batch

if TYPE_CHECKING:
    from megavis.training.callbacks.callback import StepState
    from megavis.training.engine import Engine


class Stopwatch:
    """Forwards batches and accumulates the waiting time."""

    def __init__(self, batches: Iterator[Batch]) -> None:
        self.batches, self.seconds = batches, 0.0

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        begin = time.perf_counter()
        batch = next(self.batches)
        self.seconds += time.perf_counter() - begin
        return batch


class Laps:
    """A callback that records the time of each step, and the waiting part."""

    def __init__(self, watch: Stopwatch) -> None:
        self.watch, self.laps = watch, list[tuple[float, float]]()
        self._last: tuple[float, float] | None = None

    def __call__(self, state: StepState) -> None:
        """Record a step, except for the first one, which includes warm-up."""
        now = (time.perf_counter(), self.watch.seconds)
        if self._last is not None and state.step > 1:
            self.laps.append((now[0] - self._last[0], now[1] - self._last[1]))
        self._last = now


def make_shards(folder: Path, image_size: int) -> Path:
    """Write palette shards of crops of photographs; returns their folder."""
    from data_tools.__main__ import main as data_tools

    crops, palette, shards = folder / "crops", folder / "palette.npy", folder / "shards"
    side = ["--size", str(image_size)]
    data_tools(["photographs", str(crops), *side, "--crops", "600", "--validation-crops", "40"])
    data_tools(["palette", "fit", str(crops / "train"), "--out", str(palette), *side])
    source = ["--palette", str(palette), "--out", str(shards), *side]
    data_tools(["palette", "shards", str(crops / "train"), *source])
    return shards


def main() -> None:
    """Measure and report."""
    arguments = sized_parser(__doc__.splitlines()[0], batch_size=4)
    arguments.add_argument("--shards", type=Path, help="palette shards of --image-size")
    options = arguments.parse_args()
    config = run_config(options)
    with tempfile.TemporaryDirectory() as folder:
        shards = options.shards or make_shards(Path(folder), options.image_size)
        rows = measure(config, shards, 2 * options.rounds)
    report(rows, options.json, **sizes(config))


def measure(config: RunConfig, shards: Path, num_steps: int) -> list[dict[str, object]]:
    """Train on the shards, then on one batch of them; return a row for each."""
    from megavis.data.loading.dataset import ShardDataset
    from megavis.data.loading.loader import BatchLoader
    from megavis.papers import OBJECTIVES
    from megavis.parallel.context import open_context
    from megavis.parallel.launch import read_launch
    from megavis.training.engine import Engine

    context = open_context(read_launch({}), device="cpu")
    engine = Engine(OBJECTIVES["igpt"](config, context))
    loader = BatchLoader(
        ShardDataset(shards),
        seed=0,
        micro_batch_size=engine.micro_batch_size,
        data_parallel_rank=0,
        data_parallel_size=1,
        accumulation_steps=1,
    )
    with loader:
        rows = [row("loader", engine, Stopwatch(loader), num_steps)]
        batch = next(loader)
    return [*rows, row("one batch", engine, Stopwatch(itertools.repeat(batch)), num_steps)]


def row(name: str, engine: Engine, watch: Stopwatch, num_steps: int) -> dict[str, object]:
    """Run the loop and return the medians of its laps."""
    from megavis.training.faults.watchdog import Watchdog
    from megavis.training.loop import train

    laps = Laps(watch)
    train(
        engine,
        watch,
        first_step=0,
        last_step=num_steps + 1,
        callbacks=[laps],
        metrics=None,
        finish=_keep_nothing,
        watchdog=Watchdog(engine.context, patience=0.0),
    )
    steps, waits = zip(*laps.laps, strict=True)
    return {
        "batches from": name,
        "step_s": statistics.median(steps),
        "wait_s": statistics.median(waits),
        "longest_wait_s": max(waits),
        "share": sum(waits) / sum(steps),
    }


def _keep_nothing(state: StepState) -> None:
    """Save no checkpoint."""


if __name__ == "__main__":
    main()
