"""Every ordered pair of ten layouts, for every paper: equal tensors, and equal losses after it.

It takes hours, so it is run by `make test-layouts` only. Its output is in docs/reliability.md.
"""

import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from pair_jobs import resume_from_each, save_and_continue
from small_configs import SMALL

from megavis.checkpoint.format.folder import latest_checkpoint
from megavis.checkpoint.format.tensor_reader import CheckpointReader
from megavis.parallel.workers import WorkerPool

TOLERANCE = 1e-5

# Number of processes, overrides.
LAYOUTS: dict[str, tuple[int, list[str]]] = {
    "one-zero0": (1, ["parallel.zero_stage=0"]),
    "dp2-zero1": (2, ["parallel.zero_stage=1"]),
    "dp3-zero3": (3, ["parallel.zero_stage=3", "training.micro_batch_size=2"]),
    "dp4-zero2": (4, ["parallel.zero_stage=2"]),
    "tp2-dp2-zero3": (4, ["parallel.tensor_model_parallel_size=2", "parallel.zero_stage=3"]),
    "tp4-zero2": (4, ["parallel.tensor_model_parallel_size=4", "parallel.zero_stage=2"]),
    "pp2-zero0": (2, ["parallel.pipeline_model_parallel_size=2", "parallel.zero_stage=0"]),
    "tp2-pp2-zero1": (
        4,
        ["parallel.tensor_model_parallel_size=2", "parallel.pipeline_model_parallel_size=2"],
    ),
    "cp2-dp2-zero1": (4, ["parallel.context_parallel_size=2"]),
    "tp2-cp2-zero3": (
        4,
        [
            "parallel.tensor_model_parallel_size=2",
            "parallel.context_parallel_size=2",
            "parallel.zero_stage=3",
        ],
    ),
}

NAMES = [name for name, small in SMALL.items() if small.in_every_pair]


@pytest.fixture(scope="module")
def run_job() -> Iterator[Callable[..., list[Any]]]:
    """Run a job on the first N of four workers, replaced every two jobs as engines leak threads."""
    with WorkerPool(4, max_jobs=2, preload=("megavis.training.trainer",), quiet=True) as pool:
        yield lambda job, processes, *words: pool.run(job, processes, *words, timeout=600)


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", NAMES)
def test_every_pair(run_job: Any, write_config: Any, tmp_path: Path, name: str) -> None:
    config = write_config(name)
    saved = {layout: tmp_path / "saved" / layout for layout in LAYOUTS}
    unbroken = {
        layout: run_job(save_and_continue, processes, str(config), words, saved[layout])[0]
        for layout, (processes, words) in LAYOUTS.items()
    }
    tensors = worst = 0
    for layout, (processes, words) in LAYOUTS.items():
        output = tmp_path / "loaded" / layout
        results = run_job(resume_from_each, processes, str(config), words, saved, output)
        for source in LAYOUTS:
            tensors += count_equal_tensors(saved[source], output / source)
            for losses in (result[source] for result in results):
                difference = largest_difference(losses, unbroken[source])
                assert difference <= (0 if source == layout else TOLERANCE), (source, layout)
                worst = max(worst, difference)
    print(f"{name}: {len(LAYOUTS) ** 2} pairs, {tensors} equal tensors, loss within {worst:.1e}")


def count_equal_tensors(saved: Path, loaded: Path) -> int:
    """Compare two checkpoints bit for bit; return their number of tensors."""
    one, other = latest_checkpoint(saved), latest_checkpoint(loaded)
    assert one is not None
    assert other is not None
    with CheckpointReader(one) as ours, CheckpointReader(other) as theirs:
        keys = list(ours.manifest.tensors)
        assert keys == list(theirs.manifest.tensors)
        assert ours.manifest.optimizer_step == theirs.manifest.optimizer_step
        for key in keys:
            mine, yours = ours.read(key), theirs.read(key)
            assert mine.shape == yours.shape, key
            assert mine.numpy().tobytes() == yours.numpy().tobytes(), key
        return len(keys)


def largest_difference(losses: list[float], expected: list[float]) -> float:
    assert all(map(math.isfinite, expected))
    return max(abs(a - b) / abs(b) for a, b in zip(losses, expected, strict=True))
