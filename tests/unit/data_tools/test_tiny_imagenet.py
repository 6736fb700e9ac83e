"""Tiny ImageNet as its authors publish it: labels of `val` are in a text file."""

from __future__ import annotations

import os

import numpy as np
import pytest
from image_sources import opened, small_jpeg, write_folder

from data_tools.__main__ import main
from data_tools.source_formats import find_layout
from megavis.config.errors import UserError
from megavis.data.format.manifest import Manifest
from megavis.data.format.shards import ShardReader

pytestmark = pytest.mark.once

# In the order of wnids.txt, which is not sorted.
IDS = ["n02124075", "n01443537", "n04067472"]
HELD_OUT = {"val_0.JPEG": "n04067472", "val_1.JPEG": "n01443537", "val_10.JPEG": "n02124075"}


@pytest.fixture
def root(tmp_path):
    """Nine training, three validation and two test images."""
    files = {
        "wnids.txt": "\n".join(IDS).encode() + b"\n",
        "words.txt": b"n02124075\tEgyptian cat\n",
    }
    for number, name in enumerate(IDS):
        files[f"train/{name}/{name}_boxes.txt"] = f"{name}_0.JPEG\t0\t10\t63\t58\n".encode()
        for take in range(3):
            path = f"train/{name}/images/{name}_{take}.JPEG"
            files[path] = small_jpeg(3 * number + take)
    for number, name in enumerate(HELD_OUT):
        files[f"val/images/{name}"] = small_jpeg(20 + number)
    lines = [f"{name}\t{wnid}\t0\t32\t44\t62\n" for name, wnid in HELD_OUT.items()]
    files["val/val_annotations.txt"] = "".join(lines).encode()
    for number in range(2):
        files[f"test/images/test_{number}.JPEG"] = small_jpeg(30 + number)
    return write_folder(tmp_path / "tiny-imagenet-200", files)


def labels(source):
    return {file.name: source.class_names[file.label] for file in source.files}


def test_validation_labels_are_those_of_training(root):
    assert find_layout(root) == "tiny-imagenet"
    train, test = (opened(root, "--split", split) for split in ("all", "test"))
    assert train.class_names == test.class_names == tuple(sorted(IDS))
    assert labels(train) == {
        f"{name}/images/{name}_{take}.JPEG": name for name in IDS for take in range(3)
    }
    assert labels(test) == {f"val/images/{name}": wnid for name, wnid in HELD_OUT.items()}
    assert len(opened(root, "--split", "unlabeled").files) == 2


@pytest.mark.parametrize("split", ["all", "unlabeled"])
def test_broken_links_and_names_of_other_encodings(split, root, tmp_path, capsys):
    """They are rejected or read as in a folder; the job does not fail as on a lost disk."""
    folder = root / ("test/images" if split == "unlabeled" else f"train/{IDS[0]}/images")
    (folder / "gone.JPEG").symlink_to("nowhere.JPEG")
    (folder / os.fsdecode(b"caf\xe9.JPEG")).write_bytes(small_jpeg(40))
    out = tmp_path / "out"
    assert main(["jpeg", str(root), "--split", split, "--out", str(out)]) == 0
    manifest = Manifest.read(out)
    assert manifest.skipped == {"unreadable file": 1}
    assert manifest.num_samples == (3 if split == "unlabeled" else 10)


def test_the_training_folder_alone_gives_the_same_split(root):
    """Names, and so the images held out by hash, do not depend on the layout."""
    options = ("--split", "validation", "--validation-share", 0.5)
    alone = {
        file.name for file in opened(root / "train", *options).files if "boxes" not in file.name
    }
    assert {file.name for file in opened(root, *options).files} == alone


def test_all_parts_from_files_to_shards(root, tmp_path):
    """The commands of docs/data.md."""
    for part, options in {
        "train": ["--split", "all"],
        "selection": ["--split", "validation", "--validation-share", "0.3"],
        "test": ["--split", "test"],
    }.items():
        out = tmp_path / part
        assert main(["jpeg", str(root), *options, "--out", str(out)]) == 0
    manifests = [Manifest.read(tmp_path / part) for part in ("train", "selection", "test")]
    assert len({manifest.class_names for manifest in manifests}) == 1
    assert [manifest.num_samples for manifest in manifests][::2] == [9, 3]
    assert not manifests[0].skipped
    index = ShardReader(tmp_path / "test" / "shard-000000.tar").index
    found = {
        source.split("/")[-1]: manifests[2].class_names[label]
        for source, label in zip(index.sources, index.labels, strict=True)
    }
    assert found == HELD_OUT
    # JPEG files are stored as they are.
    reader = ShardReader(tmp_path / "test" / "shard-000000.tar")
    stored = {reader.read(place).tobytes() for place in range(3)}
    assert stored == {path.read_bytes() for path in (root / "val" / "images").iterdir()}


def test_images_without_a_label_are_counted(root, tmp_path):
    (root / "val/images/val_9999.JPEG").write_bytes(small_jpeg(1))
    assert main(["jpeg", str(root), "--split", "test", "--out", str(tmp_path / "out")]) == 0
    assert Manifest.read(tmp_path / "out").skipped == {"not in the ground truth": 1}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("val/val_annotations.txt", b"val_0.JPEG\tn99999999\t0\t0\t1\t1\n"), "not in wnids.txt"),
        (
            ("val/val_annotations.txt", b"val_7.JPEG\tn01443537\t0\t0\t1\t1\n"),
            "val_7.JPEG is missing",
        ),
        (("val/val_annotations.txt", b"val_0.JPEG\n"), "line 1 has 1 word, not 2"),
        (("train/n00000001/images/a.JPEG", b"x"), "n00000001 is not in wnids.txt"),
    ],
)
def test_other_files_are_refused(root, change, message):
    write_folder(root, dict([change]))
    split = "all" if change[0].startswith("train") else "test"
    with pytest.raises(UserError, match=message):
        opened(root, "--split", split)


def test_the_validation_folder_alone_is_refused(root):
    """It was read as one class named images."""
    with pytest.raises(UserError, match=r"tiny-imagenet-200, with --split test"):
        opened(root / "val")


def test_a_missing_class_is_reported(root, capsys):
    for path in (root / "train" / IDS[0] / "images").iterdir():
        path.unlink()
    source = opened(root)
    assert source.class_names == tuple(sorted(IDS))
    assert np.unique([file.label for file in source.files]).size == 2
    assert "6 of 100000 pictures" in capsys.readouterr().out
