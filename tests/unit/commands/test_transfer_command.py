"""From a labelled data set's own files to the table of a run: shards, features, probes."""

from __future__ import annotations

import csv

import numpy as np
import pytest

from data_tools.__main__ import main as data_tools
from megavis.cli import main

pytestmark = pytest.mark.once


@pytest.fixture(scope="module")
def run(small_config, tmp_path_factory):
    """A run of two steps on other images."""
    root = tmp_path_factory.mktemp("transfer")
    path = root / "small.yaml"
    path.write_text(
        f"""\
based_on: {small_config}
output: {root}/runs
data: {{validation: null}}
"""
    )
    assert main(["train", str(path), "--device", "cpu"]) == 0
    return root / "runs" / "small"


@pytest.fixture(scope="module")
def cifar(shard_folders, tmp_path_factory):
    """CIFAR-10's files with three classes that colours tell, and shards of its splits."""
    root = tmp_path_factory.mktemp("cifar")
    files = root / "files"
    files.mkdir()
    random = np.random.default_rng(0)
    names = [*(f"data_batch_{number}" for number in range(1, 6)), "test_batch"]
    for name in names:
        labels = np.arange(30, dtype=np.uint8) % 3
        # As coarse as the shards, in which finer ones would be averaged away, and images equal.
        planes = random.integers(0, 150, (30, 3, 4, 4), np.uint8)
        planes[np.arange(30), labels] += 100
        pixels = planes.repeat(8, axis=2).repeat(8, axis=3).reshape(30, -1)
        rows = np.concatenate([labels[:, None], pixels], axis=1)
        (files / f"{name}.bin").write_bytes(rows.tobytes())
    (files / "batches.meta.txt").write_text("\n".join("abcdefghij") + "\n")
    words = ["--palette", str(shard_folders / "palette.npy"), "--size", "4"]
    for split in ("train", "validation", "test"):
        out = ["--split", split, "--validation-share", "0.3", "--out", f"{root}/shards/{split}"]
        assert data_tools(["palette", "shards", str(files), *words, *out]) == 0
    (root / "whole").mkdir()
    for split in ("train", "test"):
        (root / "whole" / split).symlink_to(root / "shards" / split)
    return root


def test_a_table_of_several_data_sets(run, cifar, capsys):
    data_sets = f"parted:{cifar}/shards,whole:{cifar}/whole"
    words = ["--layer", "0", "--images-per-class", "4", "--draws", "2", "--device", "cpu"]
    assert main(["transfer", str(run), "--data-sets", data_sets, *words]) == 0
    printed = capsys.readouterr().out
    assert (run / "evaluation" / "transfer.md").read_text() in printed
    with (run / "evaluation" / "transfer.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["labels"] for row in rows] == ["all", "all", "4 a class"] * 2
    parted, whole = rows[0], rows[3]
    assert min(float(row["accuracy"]) for row in (parted, whole)) > 0.8
    assert parted["num_test"] == "30"
    # The official training set is one set, whether its held-out part lies in a folder or not.
    held_out = int(parted["num_held_out"])
    assert int(parted["num_train"]) == 150
    assert int(whole["num_train"]) == 150 - held_out
    assert int(whole["num_held_out"]) == -(-(150 - held_out) // 5)
    assert parted["selection"].startswith("cifar-10, train set, 150 of 50000 pictures, validation")
    assert parted["test"].startswith("cifar-10, test set")


def test_few_examples_are_the_first(run, cifar, tmp_path):
    words = [f"a:{cifar}/shards,b:{cifar}/whole", "--examples", "50", "--device", "cpu"]
    assert main(["transfer", str(run), "--data-sets", *words, "--out", str(tmp_path)]) == 0
    with (tmp_path / "transfer.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [(row["num_train"], row["num_held_out"]) for row in rows] == [("50", "10")] * 2
    assert "fitted on 50 training images" in (tmp_path / "transfer.md").read_text()


@pytest.mark.parametrize(
    ("data_sets", "options", "message"),
    [
        ("a:{cifar}/shards", ["--examples", "1000"], "--examples 1000: a gives 150 labelled"),
        ("a:{cifar}/shards", ["--layer", "7"], "--layer 7: say a number from 0 to 1"),
        ("a:{cifar}/nowhere", [], "{cifar}/nowhere/train"),
        ("a:{cifar}/shards", ["--examples", "0"], "--examples must be at least 1"),
    ],
)
def test_mistakes_are_one_sentence(run, cifar, capsys, data_sets, options, message):
    words = ["--data-sets", data_sets.format(cifar=cifar), *options, "--device", "cpu"]
    assert main(["transfer", str(run), *words]) == 2
    error = capsys.readouterr().err
    assert message.format(cifar=cifar) in error
    assert error.count("\n") == 1


def test_a_list_without_names_is_refused(run, capsys):
    with pytest.raises(SystemExit):
        main(["transfer", str(run), "--data-sets", "shards/cifar10"])
    assert "is not a list of different names" in capsys.readouterr().err
