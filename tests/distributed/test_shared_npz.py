"""Processes that generate the images of one `.npz` together."""

import json
import time
from pathlib import Path

import numpy as np
import pytest

from megavis.parallel.context import close_context, open_context, set_timeouts
from megavis.sampling.batches import Batches
from megavis.sampling.pictures import write_npz

pytestmark = pytest.mark.once


def write(launch, folder, is_outdated, seconds=0.0):
    """Write ten images in batches of two; return the first images of those that were drawn.

    `is_outdated`: rank 1 sees no part that exists. `seconds`: of a batch on rank 1, more than a
    collective may take.
    """
    context, drawn = open_context(launch, device="cpu"), []

    def draw(numbers):
        drawn.append(int(numbers[0]))
        if seconds:
            set_timeouts(seconds / 2)
        time.sleep(seconds * launch.rank)
        return numbers[:, None] * 10

    with pytest.MonkeyPatch.context() as patched:
        if is_outdated and launch.rank == 1:
            exists, listed = Path.exists, Path.iterdir
            patched.setattr(Path, "exists", lambda path: path.suffix != ".npy" and exists(path))
            patched.setattr(
                Path, "iterdir", lambda path: (e for e in listed(path) if e.suffix != ".npy")
            )
        try:
            batches = Batches(context, 2, halves=False)
            write_npz(
                Path(folder) / "images.npz", draw, batches=batches, num_images=10, settings={}
            )
        finally:
            close_context()
    return drawn


def check_written(folder):
    written = np.load(folder / "images.npz")["arr_0"]
    assert np.array_equal(written, 10 * np.arange(10)[:, None])


def test_a_node_that_sees_an_outdated_folder(run_job, tmp_path):
    parts = tmp_path / "images.npz.parts"
    parts.mkdir()
    (parts / "settings.json").write_text(json.dumps({"num_images": 10, "batch_size": 2}))
    np.save(parts / "000000000.npy", np.array([[0], [10]]))
    assert run_job(write, 2, str(tmp_path), True) == [[2, 6], [4, 8]]
    check_written(tmp_path)


def test_a_process_waits_for_a_slower_one(run_job, tmp_path):
    assert run_job(write, 2, str(tmp_path), False, 0.5) == [[0, 4, 8], [2, 6]]
    check_written(tmp_path)
