"""Labelled data sets in the file formats of their authors."""

from __future__ import annotations

import pickle
from collections import Counter

import labelled_files
import numpy as np
import pytest
from image_sources import looks, opened, write_folder
from labelled_files import CIFAR10_NAMES, CIFAR100_NAMES, python2_pickle
from scipy.io import savemat

from data_tools.__main__ import main
from data_tools.decode import decode_image
from data_tools.source_formats import find_layout, open_unlabelled
from megavis.config.errors import UserError
from megavis.data.format.manifest import Manifest
from megavis.data.format.shards import ShardReader

pytestmark = pytest.mark.once

# Writer, layout, class names.
LAYOUTS = {
    "cifar10": ("cifar-10", CIFAR10_NAMES),
    "cifar10_python": ("cifar-10", CIFAR10_NAMES),
    "cifar100": ("cifar-100", CIFAR100_NAMES),
    "cifar100_python": ("cifar-100", CIFAR100_NAMES),
    "stl10": ("stl-10", CIFAR10_NAMES),
    "mnist": ("mnist", [str(digit) for digit in range(10)]),
    "svhn": ("svhn", [str(digit) for digit in range(10)]),
    "flowers": ("flowers-102", [str(number) for number in range(1, 103)]),
    "cars": ("cars", ["AM General Hummer", "Acura RL", "Acura TL"]),
    "pets": ("pets", ["Abyssinian", "american_bulldog"]),
    "dtd": ("dtd", ["banded", "zigzagged"]),
    "food": ("food-101", ["apple_pie", "waffles"]),
    "aircraft": ("aircraft", ["707-320", "A310", "DHC-8-100 (old)"]),
}


def written(name, root):
    root.mkdir(exist_ok=True)
    return getattr(labelled_files, f"write_{name}")(root)


def pictures(source):
    """Return all images in the order of the list; pickle parts, as for a worker process."""
    refused = []
    found = [
        picture
        for part in source.parts(files_per_part=3, seed=0)
        for picture in pickle.loads(pickle.dumps(part)).pictures(lambda *why: refused.append(why))
    ]
    assert not refused
    return sorted(found, key=lambda picture: picture.key)


@pytest.mark.parametrize("name", LAYOUTS)
def test_splits(name, tmp_path):
    expected = written(name, tmp_path)
    layout, class_names = LAYOUTS[name]
    assert find_layout(tmp_path) == layout
    banner = 20 if layout == "aircraft" else 0
    official = "validation" in expected
    for split in expected:
        # Without an official validation set, `train` excludes the images held out by hash.
        source = opened(tmp_path, "--split", split if official or split != "train" else "all")
        found = [(p.label, decode_image(p.content)) for p in pictures(source)]
        wanted = [
            (label, seen if isinstance(seen, np.ndarray) else decode_image(seen)[: -banner or None])
            for label, seen in expected[split]
        ]
        assert looks(found) == looks(wanted)
        assert list(source.class_names) == class_names
        assert f"{len(found)} of " in source.description  # incomplete against the published set
    trained = sum(len(expected[split]) for split in ("train", "validation") if split in expected)
    assert len(opened(tmp_path).files) == trained
    assert len(open_unlabelled(tmp_path).files) == len(expected["test"])


def test_binary_and_python_cifar_are_equal(tmp_path):
    written("cifar10", tmp_path / "binary")
    written("cifar10_python", tmp_path / "python")
    both = [opened(tmp_path / version) for version in ("binary", "python")]
    assert pictures(both[0]) == pictures(both[1])
    assert both[0].sha256 == both[1].sha256


def test_validation_split_by_hash(tmp_path):
    written("cifar10", tmp_path)
    splits = ("train", "validation", "all", "test")
    names = {
        split: {
            file.name
            for file in opened(tmp_path, "--split", split, "--validation-share", 0.3).files
        }
        for split in splits
    }
    assert names["train"] | names["validation"] == names["all"]
    assert names["validation"]
    assert not names["train"] & names["validation"]
    assert not names["all"] & names["test"]


def test_undivided_sets_are_split_by_name(tmp_path):
    written("caltech", tmp_path / "caltech")
    written("eurosat", tmp_path / "eurosat")
    found = {
        (name, split): opened(tmp_path / name, "--split", split)
        for name, splits in (
            ("caltech", ("all", "test")),
            ("eurosat", ("train", "validation", "test")),
        )
        for split in splits
    }
    counts = {key: Counter(p.label for p in source.files) for key, source in found.items()}
    assert counts["caltech", "all"] == {0: 30, 1: 30}
    assert counts["caltech", "test"] == {0: 2, 1: 1}
    assert found["caltech", "all"].class_names == ("accordion", "yin_yang")
    assert [counts["eurosat", split] for split in ("train", "validation", "test")] == [
        {0: 6, 1: 6},
        {0: 2, 1: 2},
        {0: 2, 1: 2},
    ]
    names = [
        file.name for key, source in found.items() if key[0] == "eurosat" for file in source.files
    ]
    assert len(set(names)) == 20
    # Golden: the six names with the lowest SHA-256.
    first = {file.name for file in found["eurosat", "train"].files if file.label == 0}
    assert first == {f"AnnualCrop/AnnualCrop_{number}.jpg" for number in (6, 7, 2, 9, 8, 5)}


def test_broken_links_of_an_undivided_set_are_rejected(tmp_path):
    written("eurosat", tmp_path)
    for path in sorted(tmp_path.glob("AnnualCrop/*"))[:-1]:
        path.unlink()
        path.symlink_to("nowhere.jpg")
    source = opened(tmp_path, "--split", "all")
    assert {file.refused for file in source.files if file.label == 0} == {"", "unreadable file"}


def test_shards_of_a_test_set(tmp_path):
    expected = written("cifar10_python", tmp_path / "cifar")
    words = ["jpeg", str(tmp_path / "cifar"), "--split", "test", "--size", "32"]
    assert main([*words, "--out", str(tmp_path / "shards")]) == 0
    manifest = Manifest.read(tmp_path / "shards")
    assert manifest.class_names == tuple(CIFAR10_NAMES)
    assert manifest.source.description == "cifar-10, test set, 4 of 10000 pictures"
    index = ShardReader(tmp_path / "shards" / manifest.shards[0].name).index
    assert sorted(index.labels) == sorted(label for label, _ in expected["test"])


class MaliciousObject:
    """Unpickling this calls a function."""

    def __reduce__(self):
        return print, ("called",)


def cut(path):
    path.write_bytes(path.read_bytes()[:-1])


def change_byte(path, place, value):
    content = bytearray(path.read_bytes())
    content[place] = value
    path.write_bytes(content)


ERRORS = {
    "a batch is missing": ("cifar10", lambda r: (r / "data_batch_3.bin").unlink(), "is missing"),
    "a batch is cut": ("cifar10", lambda r: cut(r / "data_batch_2.bin"), "12291 bytes.*3073"),
    "a wrong label": (
        "cifar10",
        lambda r: change_byte(r / "data_batch_5.bin", 0, 10),
        "data_batch_5.bin: the label of data_batch_5/00000 is number 10",
    ),
    "names are missing": ("cifar100", lambda r: (r / "fine_label_names.txt").unlink(), "cannot be"),
    "a pickle that calls": (
        "cifar10_python",
        lambda r: (r / "data_batch_4").write_bytes(pickle.dumps(MaliciousObject(), protocol=2)),
        "calls __builtin__.print.*binary version",
    ),
    "a cut pickle": ("cifar10_python", lambda r: cut(r / "data_batch_4"), "is damaged"),
    "no pictures": (
        "cifar10_python",
        lambda r: (r / "data_batch_4").write_bytes(python2_pickle({"labels": [1]})),
        "has no 'data'",
    ),
    "fewer labels": ("stl10", lambda r: cut(r / "train_y.bin"), "3 images, train_y.bin 2"),
    "a damaged mat": ("svhn", lambda r: cut(r / "train_32x32.mat"), "cannot be read"),
    "another mat": ("svhn", lambda r: savemat(r / "train_32x32.mat", {"z": 1}), "has no 'y'"),
    "label 11": (
        "svhn",
        lambda r: savemat(r / "train_32x32.mat", {"y": np.array([[11], [1]])}),
        "labels are in 1..11",
    ),
    "other ids": (
        "flowers",
        lambda r: savemat(r / "imagelabels.mat", {"labels": np.array([[1, 2, 3]])}),
        "lists images 2 to 6",
    ),
    "a picture is missing": (
        "pets",
        lambda r: (r / "images/Abyssinian_100.jpg").unlink(),
        "trainval",
    ),
    "an unknown class": (
        "food",
        lambda r: (r / "meta/train.txt").write_text("soup/1\n"),
        "'soup/1' is in none of 2 classes",
    ),
    "an unknown variant": (
        "aircraft",
        lambda r: (r / "data/variants.txt").write_text("A310\n"),
        "is not in data/variants.txt",
    ),
    "half a line": (
        "pets",
        lambda r: (r / "annotations/trainval.txt").write_text("a_1\n"),
        "has 1 word, not 2",
    ),
}


@pytest.mark.parametrize("case", ERRORS)
def test_damaged_files_are_errors(case, tmp_path, capsys):
    name, spoil, message = ERRORS[case]
    written(name, tmp_path)
    spoil(tmp_path)
    with pytest.raises(UserError, match=message) as caught:
        opened(tmp_path, "--layout", LAYOUTS[name][0])
    assert str(tmp_path) in str(caught.value) or "binary version" in str(caught.value)
    assert "called" not in capsys.readouterr().out


def test_unknown_splits(tmp_path):
    written("cifar10", tmp_path / "cifar")
    write_folder(tmp_path / "plain", {"a/1.jpg": b"x"})
    with pytest.raises(UserError, match="cifar-10 has no split 'extra', only train, test"):
        opened(tmp_path / "cifar", "--split", "extra")
    with pytest.raises(UserError, match="the source was read as folder"):
        opened(tmp_path / "plain", "--split", "test")
    with pytest.raises(UserError, match="is not a folder"):
        opened(tmp_path / "plain/a/1.jpg", "--layout", "dtd")
