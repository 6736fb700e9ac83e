"""Reading a shard folder: samples, checks on opening, damaged files and samples."""

from __future__ import annotations

import json
import os
import pickle
import threading

import numpy as np
import pytest
from shard_folder import write_folder

from data_tools.inspection import find_problems
from megavis.config.errors import UserError
from megavis.data.format.files import sha256_of_file
from megavis.data.format.manifest import Manifest
from megavis.data.format.sample_index import finish_folder
from megavis.data.format.shards import index_path
from megavis.data.loading import dataset as dataset_module
from megavis.data.loading.dataset import ShardDataset


def test_read(folder):
    path, tokens, labels = folder
    dataset = ShardDataset(path)
    order = np.random.default_rng(0).permutation(37)
    assert len(dataset) == 37
    assert dataset.manifest.num_tokens == 16
    assert dataset.class_names == ("a", "b", "c")
    assert dataset.read(order)[0].dtype == np.uint16
    assert (dataset.read(order)[0] == tokens[order]).all()
    assert (dataset.read(order)[1] == labels[order]).all()
    assert (dataset.labels == labels).all()
    assert dataset.read(np.array([], np.int64))[0].shape == (0, 16)
    assert not dataset.skipped
    with pytest.raises(IndexError):
        dataset.read(np.array([37]))[0]


def test_concurrent_reads_with_few_open_maps(folder, monkeypatch):
    path, tokens, _ = folder
    monkeypatch.setattr(dataset_module, "most_open_maps", lambda _: 2)
    dataset = pickle.loads(pickle.dumps(ShardDataset(path)))
    wrong = []

    def read(seed):
        order = np.random.default_rng(seed).integers(0, 37, (50, 8))
        wrong.extend(row for row in order if (dataset.read(row)[0] != tokens[row]).any())

    threads = [threading.Thread(target=read, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_truncated_shard(folder):
    path, _, _ = folder
    tar = path / "shard-000001.tar"
    size = tar.stat().st_size
    os.truncate(tar, size // 2)
    with pytest.raises(UserError, match=f"shard-000001.tar has {size // 2} bytes .* {size}"):
        ShardDataset(path)


def test_missing_files(folder):
    path, _, _ = folder
    (path / "shard-000003.tar").unlink()
    with pytest.raises(UserError, match=r"shard-000003\.tar is missing"):
        ShardDataset(path)


def test_shard_that_disappears_is_no_mistake_of_the_user(folder):
    """A run whose disk fails exits with a code after which its launcher starts it again."""
    path, _, _ = folder
    dataset = ShardDataset(path)
    (path / "shard-000003.tar").unlink()
    with pytest.raises(OSError, match=r"No such file or directory: .*shard-000003\.tar"):
        dataset.read(np.arange(len(dataset)))


def test_verify_finds_a_flipped_bit(folder):
    path, _, _ = folder
    assert find_problems(path) == []
    content = bytearray((path / "shard-000002.tar").read_bytes())
    content[700] ^= 1
    (path / "shard-000002.tar").write_bytes(content)
    assert find_problems(path) == ["shard-000002.tar does not have the SHA-256 of the manifest"]


def test_changed_palette(folder):
    path, _, _ = folder
    np.save(path / "palette.npy", np.zeros((512, 3), np.float32))
    with pytest.raises(UserError, match=r"palette\.npy is not the palette"):
        ShardDataset(path)
    (path / "palette.npy").write_bytes(b"")
    with pytest.raises(UserError, match="damaged"):
        ShardDataset(path)


def test_empty_data_set(tmp_path):
    write_folder(tmp_path, tokens=np.zeros((0, 16), np.uint16), labels=[], class_names=[])
    with pytest.raises(UserError, match="holds no sample"):
        ShardDataset(tmp_path)


def test_labels_outside_the_classes(tmp_path):
    write_folder(tmp_path, tokens=np.zeros((2, 16), np.uint16), labels=[0, 1], class_names=["a"])
    with pytest.raises(UserError, match="labels"):
        ShardDataset(tmp_path)


def edit_index(path, shard, **columns):
    """Change columns of a shard's index, and finish the folder again."""
    file = index_path(path / shard)
    index = json.loads(file.read_text())
    for column, values in columns.items():
        for place, value in values.items():
            index[column][place] = value
    file.write_text(json.dumps(index))
    manifest = json.loads((path / "manifest.json").read_text())
    entry = next(s for s in manifest["shards"] if s["name"] == shard)
    entry["index_sha256"] = sha256_of_file(file)
    (path / "manifest.json").write_text(json.dumps(manifest))
    finish_folder(path, Manifest.read(path))


def test_wrong_lengths_are_replaced(folder):
    path, tokens, labels = folder
    edit_index(path, "shard-000001.tar", lengths={3: 17, 4: 0})
    edit_index(path, "shard-000003.tar", offsets={6: 10**9})  # sample 36, the last
    dataset = ShardDataset(path)
    stand_in = np.arange(37)
    stand_in[[13, 14, 36]] = [15, 15, 0]
    assert (dataset.read(np.arange(37))[0] == tokens[stand_in]).all()
    assert (dataset.labels == labels[stand_in]).all()
    assert dataset.num_unlabelled == (labels[stand_in] < 0).sum()
    assert dataset.skipped == {"wrong length": 3}
    assert dataset.skipped_names[0] == "shard-000001.tar:000000013: wrong length"


@pytest.mark.parametrize(
    ("wrong", "wanted"),
    [
        ([0], {0: 1}),
        ([0, 1, 36], {0: 2, 1: 2, 36: 2}),
        ([5, 7, 8], {5: 6, 7: 9, 8: 9}),
        ([9, 10, 11], {9: 12, 10: 12, 11: 12}),  # over the end of a shard
        (range(1, 37), dict.fromkeys(range(1, 37), 0)),
    ],
)
def test_next_valid_sample_is_read(folder, wrong, wanted):
    path, tokens, labels = folder
    for shard in range(4):
        places = [sample - 10 * shard for sample in wrong if sample // 10 == shard]
        edit_index(path, f"shard-{shard:06d}.tar", lengths=dict.fromkeys(places, 17))
    stand_in = np.array([wanted.get(sample, sample) for sample in range(37)])
    dataset = ShardDataset(path)
    assert (dataset.read(np.arange(37))[0] == tokens[stand_in]).all()
    assert (dataset.labels == labels[stand_in]).all()
    assert dataset.skipped == {"wrong length": len(wrong)}


def test_no_sample_of_the_right_length(folder):
    path, _, _ = folder
    for shard, count in enumerate([10, 10, 10, 7]):
        edit_index(path, f"shard-{shard:06d}.tar", lengths=dict.fromkeys(range(count), 17))
    with pytest.raises(UserError, match="holds no sample of the right length"):
        ShardDataset(path)


def test_tokens_beyond_the_palette_are_replaced(tmp_path):
    tokens = np.arange(5)[:, None].repeat(16, 1).astype(np.uint16)
    tokens[[1, 2, 4], 5] = 300
    labels = np.arange(5)
    write_folder(tmp_path, tokens=tokens, labels=labels, vocabulary=200, class_names=list("abcde"))
    dataset = ShardDataset(tmp_path)
    for _ in range(2):
        read, read_labels = dataset.read(np.array([4, 1, 2, 3, 0]))
        assert read[:, 0].tolist() == [0, 3, 3, 3, 0]
        assert read_labels.tolist() == [0, 3, 3, 3, 0]
    assert dataset.skipped == {"token beyond the vocabulary": 3}


def test_no_valid_sample(tmp_path):
    tokens = np.full((3, 16), 300, np.uint16)
    write_folder(tmp_path, tokens=tokens, labels=[-1] * 3, vocabulary=200, class_names=[])
    with pytest.raises(UserError, match="no valid sample; .*:000000001: token"):
        ShardDataset(tmp_path).read(np.array([1]))
