"""`merge` and `reshard` keep order, labels and bytes, and refuse incompatible folders."""

from __future__ import annotations

import json
import os

import numpy as np
import pytest
from image_files import tree
from image_sources import small_jpeg, training_files, write_folder

from data_tools import shard_tasks as units
from data_tools.__main__ import main
from data_tools.source_formats import list_jpeg_shards
from megavis.data.format.manifest import Manifest
from megavis.data.loading.dataset import ShardDataset


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Shards of twelve labelled images, and of four unlabelled ones and a damaged file."""
    root = tmp_path_factory.mktemp("folders")
    write_folder(root / "first", training_files())
    web = {f"{number}.jpg": small_jpeg(number + 30) for number in range(4)}
    write_folder(root / "second", {**web, "bad.jpg": b""})
    for name in ("first", "second"):
        words = ["jpeg", str(root / name), "--out", str(root / f"{name}_shards"), "--size", "16"]
        assert main([*words, "--samples-per-shard", "5"]) == 0
    return root / "first_shards", root / "second_shards"


def payloads(folder):
    """Return payload, label and source of all samples, in order."""
    found = []
    for shard in Manifest.read(folder).shards:
        tar = (folder / shard.name).read_bytes()
        index = json.loads((folder / shard.name).with_suffix(".index.json").read_text())
        for place, source in enumerate(index["sources"]):
            start = index["offsets"][place]
            content = tar[start : start + index["lengths"][place]]
            found.append((content, index["labels"][place], source))
    return found


@pytest.mark.parametrize("size", [1, 7, 100])
def test_reshard_keeps_order_and_labels(folders, tmp_path, size):
    out = tmp_path / "out"
    words = ["reshard", str(folders[0]), "--out", str(out), "--samples-per-shard", str(size)]
    assert main(words) == 0
    assert payloads(out) == payloads(folders[0])
    counts = [shard.num_samples for shard in Manifest.read(out).shards]
    assert counts == [size] * (12 // size) + ([12 % size] if 12 % size else [])
    one, two = ShardDataset(folders[0]), ShardDataset(out)
    assert (one.labels == two.labels).all()
    assert (one.read(np.arange(12))[0] == two.read(np.arange(12))[0]).all()
    assert main(["verify", str(out)]) == 0


def test_merge(folders, tmp_path, monkeypatch):
    out = tmp_path / "out"
    words = ["merge", *map(str, folders), "--samples-per-shard", "6", "--out"]
    assert main([*words, str(out)]) == 0
    assert payloads(out) == payloads(folders[0]) + payloads(folders[1])
    manifest, first = Manifest.read(out), Manifest.read(folders[0])
    assert manifest.class_names == first.class_names
    assert manifest.preparation == first.preparation
    assert manifest.source.num_files == 12 + 5
    assert manifest.skipped == {"zero bytes": 1}
    before = tree(out)
    (out / "shard-000001.tar").unlink()
    redone = []
    open_shard = units.open_shard
    monkeypatch.setattr(
        units, "open_shard", lambda path, **o: redone.append(path.name) or open_shard(path, **o)
    )
    assert main([*words, str(out)]) == 0
    assert redone == ["shard-000001.tar"]
    assert tree(out) == before
    sliced = tmp_path / "sliced"
    for part in ("2/2", "1/2"):
        assert main([*words, str(sliced), "--slice", part]) == 0
    assert tree(sliced) == before


def test_merged_images_of_equal_names_are_all_read(tmp_path):
    for number, name in enumerate(("first", "second")):
        files = {f"{place}.jpg": small_jpeg(6 * number + place) for place in range(6)}
        write_folder(tmp_path / name, files)
        words = ["jpeg", str(tmp_path / name), "--out", str(tmp_path / f"{name}_shards")]
        assert main([*words, "--samples-per-shard", "4"]) == 0
    merged, out = tmp_path / "merged", tmp_path / "out"
    folders = [str(tmp_path / f"{name}_shards") for name in ("first", "second")]
    words = ["merge", *folders, "--out", str(merged), "--samples-per-shard", "5"]
    assert main(words) == 0
    assert main(["jpeg", str(merged), "--out", str(out)]) == 0
    assert Manifest.read(out).skipped == {}
    contents, _, sources = zip(*payloads(out), strict=True)
    assert set(contents) == {small_jpeg(number) for number in range(12)}
    assert len(set(sources)) == 12
    # A name does not depend on the shards.
    small = tmp_path / "small"
    assert main(["reshard", str(merged), "--out", str(small), "--samples-per-shard", "3"]) == 0
    assert list_jpeg_shards(small).sha256 == list_jpeg_shards(merged).sha256


def test_merge_of_palette_shards(shards, tmp_path):
    out = tmp_path / "out"
    assert main(["merge", f"{shards}/train", f"{shards}/validation", "--out", str(out)]) == 0
    assert len(ShardDataset(out)) == 240


@pytest.mark.parametrize("case", ["kind", "size", "classes", "unfinished", "inside"])
def test_incompatible_folders(case, folders, shards, tmp_path, capsys):
    other, out = tmp_path / "other_shards", tmp_path / "out"
    if case == "kind":
        other = shards / "train"
    elif case == "unfinished":
        other.mkdir()
    elif case == "inside":
        other, out = folders[1], folders[1] / "out"
    else:
        write_folder(tmp_path / "other", {"dogs/a.jpg": small_jpeg(1)})
        size = "16" if case == "classes" else "20"
        words = ["jpeg", str(tmp_path / "other"), "--out", str(other), "--size", size]
        assert main(words) == 0
    assert main(["merge", str(folders[0]), str(other), "--out", str(out)]) == 2
    message = {
        "kind": "differ in kind",
        "size": "differ in image_size",
        "classes": "differ in class_names",
        "unfinished": "manifest.json is missing",
        "inside": "lies inside a source",
    }[case]
    assert message in capsys.readouterr().err
    assert not out.exists()


def test_damaged_shard_is_named(folders, tmp_path, capsys):
    damaged, out = tmp_path / "damaged", tmp_path / "out"
    damaged.mkdir()
    for path in folders[0].iterdir():
        (damaged / path.name).write_bytes(path.read_bytes())
    content = (damaged / "shard-000001.tar").read_bytes()
    os.truncate(damaged / "shard-000001.tar", 1000)
    words = ["reshard", str(damaged), "--samples-per-shard", "5", "--out"]
    assert main([*words, str(out)]) == 2
    assert "shard-000001.tar is missing or does not have the SHA-256" in capsys.readouterr().err
    assert (out / "shard-000000.index.json").exists()
    assert not (out / "manifest.json").exists()
    (damaged / "shard-000001.tar").write_bytes(content)
    assert main([*words, str(out)]) == 0
    assert payloads(out) == payloads(folders[0])
