"""gpu_check's rows on the largest batch that fits, with a pretended memory."""

import pytest
import torch
from pretended_memory import PretendedMemory

from benchmarks.gpu_check.decoding import batch_rows
from megavis.sampling.batches import Batches


@pytest.mark.parametrize(
    ("free", "num_images", "values"),
    [
        # 80 of 100 images fit into four fifths.
        (1_000, 4096, (80, True, 80.0)),
        # All images do.
        (10_000, 100, (100, True, 10.0)),
    ],
)
def test_a_batch_that_fits(context, free, num_images, values):
    memory = PretendedMemory(free, (0, 10))
    batches = Batches(context, None, halves=True, memory=memory)
    rows = batch_rows(batches, memory.draw, num_images)
    assert tuple(row.value for row in rows) == values
    assert [row.passed for row in rows] == [None, True, True]


def test_a_batch_that_does_not_fit(context):
    memory = PretendedMemory(1_000, (0, 10))
    batches = Batches(context, None, halves=True, memory=memory)

    def draw(numbers):
        # The chosen batch needs more than it did when it was measured.
        is_measured = 80 not in memory.sizes
        return memory.draw(numbers if is_measured else torch.cat([numbers, numbers]))

    _, fits, _ = batch_rows(batches, draw, 4096)
    assert (fits.value, fits.passed) == (False, False)


def test_a_batch_that_fills_too_little(context):
    memory = PretendedMemory(1_000, (450, 1))
    batches = Batches(context, None, halves=True, memory=memory)
    _, _, filled = batch_rows(batches, memory.draw, 4096)
    assert (filled.value, filled.passed) == (pytest.approx(45.1), False)


def test_without_a_gpu(context):
    batches = Batches(context, None, halves=True)
    (row,) = batch_rows(batches, lambda numbers: numbers, 2)
    assert (row.value, row.passed, row.note) == (2, None, "no GPU: 64 images, or all")
