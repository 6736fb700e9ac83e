"""`megavis transfer`: tables of linear probes on labelled data sets."""

from __future__ import annotations

import csv
import json
from types import SimpleNamespace

import numpy as np
import pytest

from data_tools.__main__ import main as data_tools
from megavis.cli import main
from megavis.commands import probe
from megavis.commands.probe import LabelledFolders, read_data_sets
from megavis.config.errors import UserError

pytestmark = pytest.mark.once


@pytest.fixture(scope="module")
def run(train_small, tmp_path_factory):
    """A short run on other images."""
    return train_small(tmp_path_factory.mktemp("transfer"), "data.validation=null")


@pytest.fixture(scope="module")
def cifar(shard_folders, tmp_path_factory):
    """Files in CIFAR-10's format with three classes of different colours, and their shards."""
    root = tmp_path_factory.mktemp("cifar")
    files = root / "files"
    files.mkdir()
    random = np.random.default_rng(0)
    names = [*(f"data_batch_{number}" for number in range(1, 6)), "test_batch"]
    for name in names:
        labels = np.arange(30, dtype=np.uint8) % 3
        # Pixels as coarse as those of the shards, which would average finer ones away.
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
    (root / "list.yaml").write_text(
        f"""\
parted: {{path: {root}/shards}}
whole:
  path: {root}
  splits: {{train: shards/train, test: shards/test}}
"""
    )
    return root


def table(folder):
    with (folder / "transfer.csv").open() as file:
        return list(csv.DictReader(file))


def test_table(run, cifar, capsys):
    words = ["--layer", "0", "--images-per-class", "4", "--draws", "2", "--device", "cpu"]
    assert main(["transfer", str(run), "--data-sets", f"{cifar}/list.yaml", *words]) == 0
    printed = capsys.readouterr().out
    assert (run / "evaluation" / "transfer.md").read_text() in printed
    rows = table(run / "evaluation")
    # Raw pixels have one layer, so --layer adds no row for them.
    assert [(row["features"], row["labels"]) for row in rows[:8]] == [
        *[("trained", labels) for labels in ("all", "all", "4 a class")],
        *[("untrained, seed 0", labels) for labels in ("all", "all", "4 a class")],
        *[("raw pixels", labels) for labels in ("all", "4 a class")],
    ]
    assert [row["data_set"] for row in rows] == ["parted"] * 8 + ["whole"] * 8
    parted, whole, pixels = rows[0], rows[8], rows[14]
    assert min(float(row["accuracy"]) for row in (parted, whole, pixels)) > 0.8
    assert parted["num_test"] == "30"
    # With a validation folder, the training set includes it for the final fit.
    held_out = int(parted["num_held_out"])
    assert int(parted["num_train"]) == 150
    assert int(whole["num_train"]) == int(pixels["num_train"]) == 150 - held_out
    assert int(whole["num_held_out"]) == -(-(150 - held_out) // 5)
    assert parted["selection"].startswith("cifar-10, train set, 150 of 50000 pictures, validation")
    assert parted["test"].startswith("cifar-10, test set")


def test_baselines_match_probe(run, cifar, tmp_path):
    """`megavis probe` on the same shards gives the same accuracies."""
    folders = {part: f"{cifar}/shards/{part}" for part in ("train", "validation", "test")}
    words = ["--device", "cpu", "--untrained-networks", "1"]
    data = ["--train", folders["train"], "--selection", folders["validation"]]
    data += ["--validation", folders["test"], "--out", f"{tmp_path}/probe.json"]
    assert main(["probe", str(run), *words, *data]) == 0
    words += ["--data-sets", f"a:{cifar}/shards", "--out", str(tmp_path)]
    assert main(["transfer", str(run), *words]) == 0
    probed = json.loads((tmp_path / "probe.json").read_text())
    trained, untrained, pixels = (float(row["accuracy"]) for row in table(tmp_path))
    assert trained == probed["best_layer"]["accuracy"]
    assert untrained == probed["untrained_accuracy"]
    assert pixels == probed["pixels"]["accuracy"]


def test_plain_classifier_of_table_4(run, cifar, tmp_path):
    """iGPT, section 3.4: scikit-learn's default, also with few labels."""
    words = ["--classifier", "plain", "--images-per-class", "4", "--draws", "2", "--device", "cpu"]
    words += ["--untrained-networks", "0", "--no-pixels", "--out", str(tmp_path)]
    assert main(["transfer", str(run), "--data-sets", f"a:{cifar}/shards", *words]) == 0
    whole, few = table(tmp_path)
    assert {row["classifier"] for row in (whole, few)} == {"plain"}
    assert float(whole["penalty"]) == pytest.approx(1 / int(whole["num_train"]))
    assert (few["labels"], few["penalty"]) == ("4 a class", "")
    assert "Features are unscaled and C = 1." in (tmp_path / "transfer.md").read_text()


def test_examples_option(run, cifar, tmp_path):
    words = [f"a:{cifar}/shards", "--examples", "50", "--device", "cpu", "--out", str(tmp_path)]
    words += ["--untrained-networks", "0", "--no-pixels"]
    assert main(["transfer", str(run), "--data-sets", *words]) == 0
    [row] = table(tmp_path)
    assert (row["num_train"], row["num_held_out"]) == ("50", "10")
    assert "fitted on 50 training images" in (tmp_path / "transfer.md").read_text()


def test_few_examples_are_drawn_from_either_folder(monkeypatch):
    """Since a folder may be sorted by class; 800 and 200 images, as VTAB has them."""
    opened = SimpleNamespace(manifest=SimpleNamespace(kind="jpeg"))
    monkeypatch.setattr(probe, "open_shards", lambda _, folder, own_classes: opened)
    monkeypatch.setattr(probe, "first_images", lambda _, dataset, count: (dataset, count))
    monkeypatch.setattr(probe, "ProbeData", lambda train, _, **rest: (train, rest["selection"]))
    folders = LabelledFolders(train="a", validation="b", test="c")
    assert probe._open(None, folders, [], examples=1000) == ((opened, 800), (opened, 200))


@pytest.mark.parametrize(
    ("data_sets", "options", "message"),
    [
        ("a:{cifar}/shards", ["--examples", "1000"], "--examples 1000: a has 150 labelled"),
        (
            "a:{cifar}/shards",
            ["--per-class", "a,b"],
            "--per-class: b is not among --data-sets: a",
        ),
        ("a:{cifar}/shards", ["--layer", "7"], "--layer 7: must be a number from 0 to 1"),
        ("a:{cifar}/nowhere", [], "{cifar}/nowhere/train"),
        ("a:{cifar}/shards", ["--examples", "0"], "--examples: '0' is not a whole number of 1"),
        ("shards/cifar10", [], "--data-sets shards/cifar10: neither a YAML file nor a list of"),
        ("{cifar}/nowhere.yaml", [], "{cifar}/nowhere.yaml: no such config file"),
    ],
)
def test_errors_are_one_line(run, cifar, capsys, data_sets, options, message):
    words = ["--data-sets", data_sets.format(cifar=cifar), *options, "--device", "cpu"]
    assert main(["transfer", str(run), *words]) == 2
    error = capsys.readouterr().err
    assert message.format(cifar=cifar) in error
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: {path: x, splitz: {}}", ":1: a.splitz: unknown key; known here: path, splits"),
        ("a:\n  splits: {}", ":1: a.path: is missing; it names the folder of the splits"),
        ("a: x", ":1: a: must hold keys, not 'x'; known here: path, splits"),
        ("a:\n  path: 3", ":2: a.path: must be a string, not 3"),
        (
            "a: {path: x, splits: {dev: x}}",
            ":1: a.splits.dev: unknown key; known here: train, validation, test",
        ),
        ("a: {path: x}\na: {path: y}", ":1: a: is given twice, also on line 2; keep one"),
        ("{}", " names no data set; one is, for example, cifar10: {path: FOLDER}"),
    ],
)
def test_errors_in_a_file_have_line_numbers(tmp_path, text, message):
    path = tmp_path / "list.yaml"
    path.write_text(text)
    with pytest.raises(UserError) as raised:
        read_data_sets(str(path))
    assert str(raised.value).startswith(f"{path}{message}")


def test_splits_in_a_file(tmp_path):
    (tmp_path / "a" / "validation").mkdir(parents=True)
    path = tmp_path / "list.yml"
    path.write_text(
        f"found: {{path: {tmp_path}/a}}\n"
        f"left: {{path: {tmp_path}/a, splits: {{validation: null}}}}\n"
        "named: {path: s3://b, splits: {train: t, validation: v, test: e}}\n"
        "absent: {path: b}\n"
    )
    assert read_data_sets(str(path)) == {
        "found": LabelledFolders(*(f"{tmp_path}/a/{p}" for p in ("train", "test", "validation"))),
        "left": LabelledFolders(f"{tmp_path}/a/train", f"{tmp_path}/a/test", None),
        "named": LabelledFolders("s3://b/t", "s3://b/e", "s3://b/v"),
        "absent": LabelledFolders("b/train", "b/test", None),
    }
