"""A run knows its classes by name: for sampling, and in comparison with other images."""

import shutil

import pytest
from shard_folder import with_classes

import megavis
from megavis.checkpoint.format.folder import latest_checkpoint
from megavis.checkpoint.format.manifest import read_manifest
from megavis.checkpoint.format.tensor_reader import read_weights
from megavis.cli import main
from megavis.commands.opening import job_closed
from megavis.config.load import load_config
from megavis.data.loading.dataset import ShardDataset
from megavis.weights.released import write_run

pytestmark = pytest.mark.once

CONFIG = """\
name: named
output: {folder}/runs
objective:
  name: compose
  reads: {{kind: colors, vocabulary_size: 64}}
  schedule: {{kind: one_by_one}}
  asks: {{kind: shift}}
  density: {{kind: categorical}}
  condition: {{kind: labels, num_classes: 12, dropout: 0.1}}
model: {{num_layers: 1, hidden_size: 16, num_attention_heads: 2}}
data: {{train: {shards}/train, image_size: 8}}
optimizer: {{learning_rate: 1e-2}}
training: {{steps: 4, batch_size: 8}}
"""


@pytest.fixture(scope="module")
def folder(shards, tmp_path_factory):
    folder = tmp_path_factory.mktemp("named")
    (folder / "named.yaml").write_text(CONFIG.format(folder=folder, shards=shards))
    assert main(["train", str(folder / "named.yaml"), "--device", "cpu"]) == 0
    return folder


@pytest.fixture(scope="module")
def names(shards):
    return ShardDataset(shards / "train").class_names


def test_a_run_records_the_names(folder, names):
    with job_closed():
        run = megavis.load(folder / "runs" / "named", device="cpu")
        assert run.classes == names
        assert run.untrained().classes == ()


def test_classes_are_sampled_by_name(folder, names, capsys):
    words = ["sample", str(folder / "runs" / "named"), "--per-class", "2", "--device", "cpu"]
    for file, classes in {"named": f"{names[3]}, -1", "numbered": "3,-1", "other": "3,0"}.items():
        out = str(folder / f"{file}.png")
        assert main([*words, "--classes", classes, "--out", out]) == 0
    named, numbered, other = (
        (folder / f"{file}.png").read_bytes() for file in ("named", "numbered", "other")
    )
    assert named == numbered != other
    capsys.readouterr()
    assert main([*words, "--classes", f"0,{names[1]},owl"]) == 2
    message = f"--classes: this run has no class 'owl'; its {len(names)} classes are {names[0]}, "
    assert message in capsys.readouterr().err


def test_completed_images_have_the_classes_of_the_run(shards, folder, names, capsys):
    other = with_classes(shards / "validation", folder / "other", names[::-1])
    run, words = str(folder / "runs" / "named"), ["--prefix", "0.5", "--device", "cpu"]
    assert main(["sample", run, *words, "--images", str(other)]) == 2
    said = f"{other} numbers its classes differently from the run's training set"
    assert said in capsys.readouterr().err
    out = ["--out", str(folder / "completed.png")]
    assert main(["sample", run, *words, "--images", str(shards / "validation"), *out]) == 0


def test_figures_without_classes_take_any_images(shards, folder, names, capsys):
    other = with_classes(shards / "validation", folder / "reversed", names[::-1])
    run = str(folder / "runs" / "named")
    words = ["--images", str(other), "--num-images", "4", "--device", "cpu"]
    assert main(["figure", "correlation", run, *words]) == 0
    assert main(["figure", "completions", run, *words]) == 0
    assert main(["figure", "patches", run, *words]) == 2
    assert "numbers its classes differently" in capsys.readouterr().err


def test_exported_runs_keep_the_names(folder, names):
    out = folder / "exported"
    assert main(["export", str(folder / "runs" / "named"), "--to", "huggingface", str(out)]) == 0
    with job_closed():
        assert megavis.load(out, device="cpu").classes == names


def test_imports_of_exports_keep_names_and_step(folder, names):
    run, out, again = (folder / each for each in ("runs/named", "shared", "again"))
    assert main(["export", str(run), "--to", "huggingface", str(out)]) == 0
    assert main(["import", "huggingface", str(out), str(again)]) == 0
    with job_closed():
        assert megavis.load(again, device="cpu").classes == names
    first, second = (read_manifest(latest_checkpoint(each)) for each in (run, again))
    assert (second.step, second.samples_seen) == (first.step, first.samples_seen) == (4, 32)


def test_released_weights_may_name_classes_in_other_words(shards, folder, names, capsys):
    config = load_config(folder / "runs" / "named" / "config.yaml").config
    weights = read_weights(latest_checkpoint(folder / "runs" / "named"))
    words = ["--prefix", "0.5", "--device", "cpu", "--images", str(shards / "validation")]
    for place, classes, code in (
        ("foreign", tuple(f"n{number}" for number in range(12)), 0),
        ("swapped", names[::-1], 2),
    ):
        run, out = folder / place, ["--out", str(folder / f"{place}.png")]
        write_run(run, config, weights, classes=classes)
        shutil.copy(folder / "runs" / "named" / "palette.npy", run)
        assert main(["sample", str(run), *words, *out]) == code
    assert "numbers its classes differently" in capsys.readouterr().err


def test_images_may_lack_the_last_classes(shards, folder, names, capsys):
    """As images for the first of several training folders do."""
    config = (folder / "named.yaml").read_text()
    (folder / "more.yaml").write_text(config.replace("name: named", "name: more", 1))
    more = with_classes(shards / "validation", folder / "more", [*names[1:], "owl"])
    blend = (
        f"data.train=[{{path: {shards}/train, weight: 1}}, {{path: {more}, weight: 1}}]",
        f"data.validation={shards}/validation",
    )
    assert main(["train", str(folder / "more.yaml"), *blend, "--device", "cpu"]) == 0
