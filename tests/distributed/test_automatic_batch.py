"""Processes whose devices have different memory choose the same batch size."""

from pathlib import Path

import numpy as np
import pytest
import torch
from pretended_memory import PretendedMemory

from megavis.config.errors import UserError
from megavis.config.section import ParallelConfig
from megavis.parallel.context import close_context, open_context
from megavis.sampling.batches import Batches
from megavis.sampling.pictures import write_npz

pytestmark = pytest.mark.once


def generate(launch, rooms, num_images, tensor_size, folder):
    """Draw images, and write them too, in `rooms[rank]` bytes; return sizes, images and chosen."""
    layout = ParallelConfig(tensor_model_parallel_size=tensor_size)
    context = open_context(launch, layout, device="cpu")
    try:
        memory = PretendedMemory(rooms[launch.rank], (0, 10))

        def batches():
            return Batches(context, None, halves=tensor_size == 1, memory=memory)

        chosen = batches()
        images = chosen.distribute(memory.draw, num_images)
        write_npz(
            Path(folder) / "images.npz",
            memory.draw,
            batches=batches(),
            num_images=num_images,
            settings={},
        )
        return memory.sizes, images.flatten().tolist(), chosen.size
    except (UserError, torch.OutOfMemoryError) as error:
        return type(error).__name__
    finally:
        close_context()


def test_the_smallest_of_all_processes(run_job, tmp_path):
    # 20 and 40 images fit into four fifths; each process has 66 and could measure 8 at once.
    rooms = (250, 500)
    results = run_job(generate, 2, rooms, 131, 1, str(tmp_path))
    drawn = [1, 8, *[16] * 4, 2]
    for rank, (sizes, images, chosen) in enumerate(results):
        assert chosen == 16
        assert images == list(range(0, 1310, 10))
        # The file's last batch is the third one of the first process.
        written = [1, 8, *[16] * 4, 3] if rank == 0 else [1, 8, *[16] * 4]
        assert sizes == drawn + written
    written = np.load(tmp_path / "images.npz")["arr_0"]
    assert np.array_equal(written, 10 * np.arange(131)[:, None])


def test_processes_that_share_layers_draw_the_same_batches(run_job, tmp_path):
    results = run_job(generate, 2, (500, 250), 40, 2, str(tmp_path))
    # Four fifths of 250 bytes hold 20 images.
    assert [sizes for sizes, _, _ in results] == [[1, 5, 16, 16, 8] * 2] * 2


def test_all_processes_end_where_one_has_no_room(run_job, tmp_path):
    assert run_job(generate, 2, (500, 5), 200, 1, str(tmp_path)) == ["UserError"] * 2
    assert list(tmp_path.iterdir()) == []
