"""The figure of a job's memory use."""

from __future__ import annotations

import numpy as np
import pytest
from PIL import Image

from data_tools.job_report import JobOutcome, write_memory_figure
from data_tools.shard_tasks import UnitResult

pytestmark = pytest.mark.once
MEBIBYTE = 2**20


def outcome(peaks, *, images=1000):
    """A job whose shards of `images` images ended at these memory peaks in MiB."""
    return JobOutcome([UnitResult(images, (), {}, {}, False, peak * MEBIBYTE) for peak in peaks])


def test_memory_course_is_a_running_maximum():
    job = outcome([20, 50, 40], images=10)
    job.results.insert(1, UnitResult(10, (), {}, {}, True, 90 * MEBIBYTE))
    assert job.memory_course() == [(10, 20 * MEBIBYTE), (20, 50 * MEBIBYTE), (30, 50 * MEBIBYTE)]
    thinned = outcome(range(1, 1001)).memory_course(points=10)
    assert len(thinned) == 10
    assert thinned[-1] == (1_000_000, 1000 * MEBIBYTE)


def test_long_jobs_have_a_figure(tmp_path):
    path = tmp_path / "memory.png"
    assert write_memory_figure(path, outcome([100] * 10))
    flat = np.asarray(Image.open(path).convert("RGB")).astype(int)
    assert min(flat.shape[:2]) > 300
    # A flat course is a horizontal line of blue dots.
    blue = (np.abs(flat - [0x1F, 0x5F, 0xA8]).max(axis=2) < 8).any(axis=1)
    assert 0 < blue.sum() < 30
    assert write_memory_figure(path, outcome(range(1, 11)))
    rising = np.asarray(Image.open(path).convert("RGB")).astype(int)
    assert (np.abs(rising - [0x1F, 0x5F, 0xA8]).max(axis=2) < 8).any(axis=1).sum() > 300


@pytest.mark.parametrize(
    "job", [outcome([]), outcome([100] * 4, images=20_000), outcome([100] * 9)]
)
def test_short_jobs_have_no_figure(job, tmp_path):
    assert not write_memory_figure(tmp_path / "memory.png", job)
    assert not list(tmp_path.iterdir())
