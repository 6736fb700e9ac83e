"""The index of a shard folder: its content, and what opening a large folder takes of memory."""

import json
import pickle
import resource
import tracemalloc
from pathlib import Path

import numpy as np
import pytest

from megavis.data.format.manifest import Manifest, Preparation, ShardEntry, SourceIdentity
from megavis.data.format.sample_index import (
    RECORD,
    SAMPLE_INDEX_NAME,
    SampleIndex,
    write_sample_index,
)
from megavis.data.format.shards import ShardIndex, write_index
from megavis.data.loading import dataset as dataset_module
from megavis.data.loading.dataset import ShardDataset

pytestmark = pytest.mark.once
NUM_SHARDS, IN_SHARD, STRIDE = 400, 2_500, 2_048


def test_index_has_what_the_shards_list(folder):
    path, _, labels = folder
    index = SampleIndex(path, Manifest.read(path))
    listed = [json.loads(file.read_text()) for file in sorted(path.glob("shard-*.index.json"))]
    records, shards = index.take(np.arange(37))
    for column, name in (("offsets", "offset"), ("lengths", "length"), ("labels", "label")):
        whole = [value for shard in listed for value in shard[column]]
        assert records[name].tolist() == whole
    assert shards.tolist() == [place // 10 for place in range(37)]
    assert index.labels().tolist() == labels.tolist()
    keys = [key for shard in listed for key in shard["keys"]]
    assert [index.key(place) for place in range(37)] == keys


def test_size_on_disk(folder, million):
    for path, num_shards, num_samples in ((folder[0], 4, 37), (million, NUM_SHARDS, 10**6)):
        size = (path / SAMPLE_INDEX_NAME).stat().st_size
        assert size == 96 + 80 * num_shards + 16 * num_samples
    assert size / num_samples < 17


def test_copy_in_another_process_maps_the_file_itself(folder):
    path, tokens, _ = folder
    dataset = ShardDataset(path)
    state = pickle.dumps(dataset)
    assert len(state) < 10_000
    assert (pickle.loads(state).read(np.arange(37))[0] == tokens).all()


@pytest.fixture(scope="module")
def million(tmp_path_factory):
    """A folder of 10^6 samples in sparse tars, whose index is written column by column here."""
    path, count = tmp_path_factory.mktemp("million"), NUM_SHARDS * IN_SHARD
    shards, blocks = [], []
    for number in range(NUM_SHARDS):
        name = f"shard-{number:06d}.tar"
        with (path / name).open("wb") as file:
            file.truncate(IN_SHARD * STRIDE)
        sizes = {"num_samples": IN_SHARD, "num_bytes": IN_SHARD * STRIDE}
        shards.append(ShardEntry(name=name, **sizes, sha256="0" * 64, index_sha256="0" * 64))
        places = np.arange(IN_SHARD) + number * IN_SHARD
        records = np.zeros(IN_SHARD, RECORD)
        records["offset"] = np.arange(IN_SHARD) * STRIDE + 512
        records["length"], records["label"] = 1_000, places % 1_000
        blocks.append(records)
        keys = [f"{place:09d}" for place in places.tolist()]
        columns = dict.fromkeys(("offsets", "lengths", "labels", "sources"), [0] * IN_SHARD)
        write_index(path / name, ShardIndex(shard=name, job="", keys=keys, **columns))
    Manifest(
        format_version=1,
        kind="jpeg",
        image_size=8,
        preparation=Preparation(resize="bicubic", crop="centre", decoders={}),
        class_names=tuple(map(str, range(1_000))),
        shards=tuple(shards),
        index_sha256=write_sample_index(path, shards, blocks),
        skipped={},
        seed=0,
        source=SourceIdentity(description="zeros", num_files=count, sha256="0" * 64),
        tool_version="0",
    ).write(path)
    return path


def test_opening_keeps_and_takes_next_to_nothing_per_sample(million):
    tracemalloc.start()
    try:
        dataset = ShardDataset(million)
        order = dataset.order(0)
        kept, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(dataset) == 10**6
    assert order.dataset_index(np.arange(3)).shape == (3,)
    assert kept / len(dataset) < 1, "it was 99 bytes a sample"
    assert peak / len(dataset) < 3, "it was 318 bytes a sample"
    assert resident(million) == 0, "no record is looked at"


def test_records_of_passed_shards_leave_memory(million):
    dataset = ShardDataset(million)
    for shard in range(NUM_SHARDS):
        dataset._index.of_shard(shard)
    assert resident(million) >= 16 * 10**6 // 1024
    for shard in range(NUM_SHARDS):
        dataset._index.release(shard)
    assert resident(million) <= 32, "KiB: the head, which the first shard brought in"
    assert (dataset._index.take(np.array([999_999]))[0]["label"] == 999).all()


def resident(folder):
    """Return the KiB of a folder's index that are mapped in this process's memory."""
    smaps, found = Path("/proc/self/smaps").read_text().splitlines(), 0
    for place, line in enumerate(smaps):
        if line.endswith(str(folder / SAMPLE_INDEX_NAME)):
            found += next(int(each.split()[1]) for each in smaps[place:] if each.startswith("Rss:"))
    return found


def test_samples_of_a_large_folder(million):
    dataset = ShardDataset(million)
    indices = np.array([0, 2_499, 2_500, 999_999])
    assert [dataset.name_of(index) for index in indices.tolist()] == [
        "shard-000000.tar:000000000",
        "shard-000000.tar:000002499",
        "shard-000001.tar:000002500",
        "shard-000399.tar:000999999",
    ]
    assert (dataset.labels == np.arange(10**6) % 1_000).all()
    assert dataset.payload(123_456) == bytes(1_000)


def test_shards_stay_mapped(million, monkeypatch):
    """A random order over all shards opens each file once."""
    opened = []
    memmap = np.memmap
    monkeypatch.setattr(
        dataset_module.np,
        "memmap",
        lambda file, *how, **more: opened.append(file.name) or memmap(file, *how, **more),
    )
    dataset = ShardDataset(million)
    opened.clear()
    order = dataset.order(0)
    for start in range(0, 8_192, 64):
        indices = order.dataset_index(np.arange(start, start + 64))
        dataset._payloads(indices)
    assert len(opened) == NUM_SHARDS


@pytest.mark.parametrize(
    ("limit", "wanted"), [(1_024, 256), (65_536, 16_384), (resource.RLIM_INFINITY, 16_384)]
)
def test_number_of_maps_follows_the_limit_of_open_files(monkeypatch, limit, wanted):
    monkeypatch.setattr(resource, "getrlimit", lambda _: (limit, limit))
    assert dataset_module.most_open_maps() == wanted
    assert dataset_module.most_open_maps(4) == wanted // 4
