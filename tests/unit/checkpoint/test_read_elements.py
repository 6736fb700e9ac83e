"""Ranges of elements of logical tensors, against NumPy's slices of the whole tensors."""

import itertools
import re
from pathlib import Path

import numpy as np
import pytest
import torch

from megavis.checkpoint.format.manifest import (
    CheckpointManifest,
    LogicalTensor,
    TensorSlice,
    write_manifest,
)
from megavis.checkpoint.format.tensor_reader import CheckpointReader
from megavis.checkpoint.state.save import write_tensors
from megavis.config.errors import UserError

pytestmark = pytest.mark.once
SHAPES = {"vector": (11,), "matrix": (6, 4), "cube": (4, 6, 5)}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """A folder with each tensor whole, and in two pieces along each dimension that is even."""
    folder = tmp_path_factory.mktemp("checkpoint")
    whole, entries, files = {}, {}, ({}, {})
    for name, shape in SHAPES.items():
        value = np.random.default_rng(len(shape)).normal(size=shape).astype(np.float32)
        for dimension in (None, *range(len(shape))):
            key = f"weight/{name}-{dimension}"
            if dimension is not None and shape[dimension] % 2:
                continue
            whole[key] = value
            if dimension is None:
                files[0][key] = torch.from_numpy(value)
                entries[key] = LogicalTensor.whole(shape, "0", key)
                continue
            half = shape[dimension] // 2
            for place in range(2):
                piece = value.take(range(half * place, half * (place + 1)), dimension)
                files[place][key] = torch.from_numpy(piece)
            slices = tuple(
                TensorSlice(file=str(place), key=key, start=half * place, length=half)
                for place in range(2)
            )
            entries[key] = LogicalTensor(shape=shape, dimension=dimension, slices=slices)
    stored = {str(place): write_tensors(folder / str(place), files[place]) for place in range(2)}
    numbers = {"step": 0, "samples_seen": 0, "optimizer_step": 0, "seed": 0}
    write_manifest(
        folder,
        CheckpointManifest(**numbers, tokenizer=None, layout={}, files=stored, tensors=entries),
    )
    return folder, whole


def test_ranges_equal_slices_of_the_whole(checkpoint):
    folder, whole = checkpoint
    tried = 0
    with CheckpointReader(folder) as reader:
        for key, value in whole.items():
            for dimension in range(value.ndim):
                half = value.shape[dimension] // 2
                for start in (0, half):
                    part = value.take(range(start, start + half), dimension).reshape(-1)
                    for first, last in itertools.combinations(range(part.size + 1), 2):
                        read = reader.read_elements(
                            key, range(first, last), start, half, dimension=dimension
                        )
                        assert read.shape == (last - first,)
                        assert (read.numpy() == part[first:last]).all(), (key, dimension, first)
                        tried += 1
    assert tried > 10_000


def test_no_elements(checkpoint):
    folder, whole = checkpoint
    with CheckpointReader(folder) as reader:
        for key in whole:
            assert reader.read_elements(key, range(3, 3)).shape == (0,)
        assert reader.bytes_read == 0
        with pytest.raises(UserError, match="has no tensor weight/other"):
            reader.read_elements("weight/other", range(3))


@pytest.mark.parametrize(
    ("key", "where", "elements", "wanted"),
    [
        ("cube-None", {}, range(7, 60), 53),
        ("cube-0", {}, range(7, 70), 63),  # over the end of a piece
        ("cube-None", {"start": 3, "length": 3, "dimension": 1}, range(2, 33), 31),
        ("cube-1", {"start": 3, "length": 3, "dimension": 1}, range(2, 33), 31),
        ("cube-1", {}, range(2, 33), 60),  # whole rows of both pieces
    ],
)
def test_other_elements_are_not_read(checkpoint, key, where, elements, wanted):
    with CheckpointReader(checkpoint[0]) as reader:
        reader.read_elements(f"weight/{key}", elements, **where)
        assert reader.bytes_read == 4 * wanted


def test_pages_of_other_elements_stay_on_disk(tmp_path):
    """By the kernel's account of the mapped file, not the reader's."""
    value = torch.zeros(4096, 4096)
    stored = write_tensors(tmp_path / "0", {"weight/a": value})
    numbers = {"step": 0, "samples_seen": 0, "optimizer_step": 0, "seed": 0}
    entries = {"weight/a": LogicalTensor.whole(value.shape, "0", "weight/a")}
    manifest = CheckpointManifest(
        **numbers, tokenizer=None, layout={}, files={"0": stored}, tensors=entries
    )
    write_manifest(tmp_path, manifest)
    with CheckpointReader(tmp_path) as reader:
        read = reader.read_elements("weight/a", range(2**20, 2**21))
        assert float(read.sum()) == 0.0
        mapped = Path("/proc/self/smaps").read_text().split(str(tmp_path / "0"))[1]
    resident = int(re.search(r"Rss: +(\d+) kB", mapped)[1])
    # 4 MB of 64, and what the kernel maps around the ends: up to a huge page of 2 MB each.
    assert 4 * 2**10 <= resident < 9 * 2**10
