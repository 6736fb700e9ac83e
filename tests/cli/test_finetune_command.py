"""`megavis finetune`: results and errors."""

import csv
import json
import shutil

import pytest
import torch
import yaml
from made_results import made, write_results

import megavis
from megavis.checkpoint.format.folder import latest_checkpoint, saved_steps, step_folder
from megavis.checkpoint.format.tensor_reader import read_weights
from megavis.cli import main
from megavis.commands import evaluate_watch
from megavis.commands.opening import job_closed

pytestmark = pytest.mark.once


@pytest.fixture(scope="module")
def config(small_config, tmp_path_factory):
    """A fine-tuning config, and the run of two steps that it starts from."""
    root = tmp_path_factory.mktemp("finetune")
    path = root / "small.yaml"
    path.write_text(
        f"""\
based_on: {small_config}
name: source
output: {root}/runs
training: {{steps: 2, log_every: 1, validate_every: 1}}
"""
    )
    assert main(["train", str(path), "--device", "cpu"]) == 0
    tree = yaml.safe_load(path.read_text())
    tree["name"] = "tuned"
    tree["finetune"] = {"from_run": f"{root}/runs/source", "num_classes": 3}
    (root / "tuned.yaml").write_text(yaml.safe_dump(tree))
    return root / "tuned.yaml"


def refused(capsys, path, *words):
    """Run fine-tuning, expect exit code 2, and return the error message."""
    assert main(["finetune", str(path), "--device", "cpu", *words]) == 2
    message = capsys.readouterr().err
    assert message.startswith("error: ")
    assert "Traceback" not in message
    return message


@pytest.mark.parametrize("two_folders", [True, False])
def test_finetune_learns_colour_classes(config, capsys, tmp_path, shard_folders, two_folders):
    words = [f"output={tmp_path}", "training.steps=30", "training.validate_every=10"]
    # Drop path is off in evaluation, which uses one view per image.
    words += ["finetune.patience=1", "finetune.generative_weight=1", "finetune.drop_path=0.1"]
    words += [f"finetune.test={shard_folders}/selection"] * two_folders
    assert main(["finetune", str(config), "--device", "cpu", *words]) == 0
    printed = capsys.readouterr().out
    counts = {"selection": 36, "test": 36} if two_folders else {"selection": 18, "test": 18}
    for part, count in counts.items():
        path = tmp_path / "tuned" / "evaluation" / f"finetune_{part}.json"
        result = json.loads(path.read_text())
        assert result["top1"] > 0.9
        assert (result["num_images"], result["num_views"]) == (count, 1)
        assert f"{part}, best step {result['step']}: top-1 {result['top1']:.1%}, top-5 100" in (
            printed
        )
        assert path.with_suffix(".png").exists()


def test_resumed_linear_evaluation_in_bf16_has_the_same_statistics(config, tmp_path, capsys):
    words = [f"output={tmp_path}", "finetune.linear_evaluation=true", "training.precision=bf16"]
    words += ["parallel.zero_stage=1", "schedule={decay: constant}"]

    def statistics(name, *lengths):
        for steps in lengths:
            run = [f"name={name}", f"training.steps={steps}"]
            assert main(["finetune", str(config), "--device", "cpu", *words, *run]) == 0
        return read_weights(latest_checkpoint(tmp_path / name), "head.classifier.standardize.")

    whole, resumed = statistics("whole", 4), statistics("resumed", 2, 4)
    assert whole.keys() == resumed.keys() == {"mean", "variance"}
    for name, value in whole.items():
        assert torch.equal(resumed[name], value)
    assert main(["sample", str(tmp_path / "whole"), "--device", "cpu"]) == 2
    assert "a fine-tuned run classifies and generates no images" in capsys.readouterr().err
    assert main(["figure", "patches", str(tmp_path / "whole"), "--device", "cpu"]) == 2
    assert (
        "take the run that this one started from; figures of this run are: depth, likelihood,"
        in (capsys.readouterr().err)
    )


def test_results_do_not_count_as_those_of_other_images(config, capsys, tmp_path, shard_folders):
    words = [f"output={tmp_path}", "training.steps=1"]
    assert main(["finetune", str(config), *words, "--device", "cpu"]) == 0
    moved = shutil.copytree(shard_folders / "validation", tmp_path / "moved")
    there = f"data.validation={moved}"
    assert main(["finetune", str(config), *words, there, "--device", "cpu"]) == 0
    capsys.readouterr()
    kept = (tmp_path / "tuned" / "config.yaml").read_text()
    other = shard_folders / "selection"
    message = refused(capsys, config, *words, f"data.validation={other}")
    assert f"data.validation: {other} holds other images than" in message
    assert f"`megavis ensemble {tmp_path}/tuned --images {other}` classifies them" in message
    assert (tmp_path / "tuned" / "config.yaml").read_text() == kept


def test_accuracies_on_other_images_are_not_continued(config, capsys, tmp_path, shard_folders):
    words = [f"output={tmp_path}", "training.steps=4", "checkpoint.every=2"]
    words += ["training.validate_every=1"]
    assert main(["finetune", str(config), *words, "--device", "cpu"]) == 0
    # As if it had been killed after step 2.
    shutil.rmtree(tmp_path / "tuned" / "evaluation")
    shutil.rmtree(step_folder(tmp_path / "tuned", 4))
    capsys.readouterr()
    other, before = shard_folders / "selection", shard_folders / "validation"
    message = refused(capsys, config, *words, f"data.validation={other}")
    said = (
        f"{other} holds other images than {before}, on which this run has measured its accuracies"
    )
    assert f"data.validation: {said} so far: choose another name" in message
    shutil.rmtree(tmp_path / "tuned" / "checkpoints")
    again = ["finetune", str(config), *words, f"data.validation={other}", "--device", "cpu"]
    assert main(again) == 0


def test_extended_finetuning_replaces_its_results(config, capsys, tmp_path, monkeypatch):
    def finetune(steps):
        words = [f"output={tmp_path}", f"training.steps={steps}", "training.validate_every=10"]
        assert main(["finetune", str(config), "--device", "cpu", *words]) == 0
        result = json.loads((folder / "evaluation" / "finetune_test.json").read_text())
        return capsys.readouterr().out, result["step"]

    def stop(seconds):
        raise KeyboardInterrupt

    def watch():
        assert main(["evaluate", "watch", str(folder), "--what", "loss", "--device", "cpu"]) == 0
        return capsys.readouterr().out

    folder = tmp_path / "tuned"
    assert finetune(1)[1] == 1
    monkeypatch.setattr(evaluate_watch.time, "sleep", stop)
    assert "stopped" not in watch()
    # As at the start of the extension, before its first checkpoint.
    text = (folder / "config.yaml").read_text()
    (folder / "config.yaml").write_text(text.replace("steps: 1\n", "steps: 30\n"))
    assert "stopped" in watch()
    printed, step = finetune(30)
    assert step > 1
    assert f"test, best step {step}: top-1 " in printed
    assert "stopped" not in watch()
    assert finetune(30) == ("", step)


def test_chosen_step_is_opened_exported_and_kept(config, capsys, tmp_path):
    words = [f"output={tmp_path}", "training.steps=5", "training.validate_every=1"]
    words += ["checkpoint.every=1", "checkpoint.keep_last=9", "checkpoint.keep_at=[2]"]
    assert main(["finetune", str(config), "--device", "cpu", *words]) == 0
    folder = tmp_path / "tuned"
    evaluation = folder / "evaluation"
    result = json.loads((evaluation / "finetune_test.json").read_text())
    (evaluation / "finetune_test.json").write_text(json.dumps({**result, "step": 1}))
    likelihood = made("likelihood.json", nats_per_dimension=2.5, step=4)
    write_results(folder, likelihood=likelihood)

    with job_closed():
        assert megavis.load(folder, device="cpu").step == 1
        assert megavis.load(folder, device="cpu", step=5).step == 5
    words = [f"output={tmp_path}", "name=further", f"finetune.from_run={folder}"]
    capsys.readouterr()
    assert main(["finetune", str(config), "--device", "cpu", *words, "training.steps=1"]) == 0
    assert f"the head continues from {step_folder(folder, 1)}\n" in capsys.readouterr().out
    assert main(["export", str(folder), "--to", "huggingface", str(tmp_path / "out")]) == 0
    card = (tmp_path / "out" / "README.md").read_text()
    assert "parameters after step 1.\n" in card
    assert f"| classes, test images | {result['top1']:.1%} (of 18) |" in card
    assert "| likelihood, per dimension | 2.50 nats (step 4) |" in card
    path = evaluation / "likelihood.json"
    path.write_text(path.read_text().replace('"run"', '"of"'))
    assert main(["export", str(folder), "--to", "huggingface", str(tmp_path / "no")]) == 2
    assert f"{path} is not a result of `megavis likelihood`: `run`" in capsys.readouterr().err
    write_results(folder, likelihood=likelihood)
    with job_closed():
        assert megavis.load(tmp_path / "out", device="cpu").step == 1

    # The best step according to the metrics, which an unfinished run needs.
    history = [{"step": step, "validation_accuracy": float(step == 3)} for step in range(1, 6)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in history))
    assert main(["checkpoint", "prune", str(folder), "--keep-last", "1"]) == 0
    assert saved_steps(folder) == [1, 2, 3, 5]
    shutil.rmtree(step_folder(folder, 1))
    assert main(["export", str(folder), "--to", "safetensors", str(tmp_path / "weights")]) == 2
    message = "has no checkpoint of step 1, which its fine-tuning chose; name another step: 2, 3, 5"
    assert message in capsys.readouterr().err


def test_search_lr_of_a_linear_evaluation(config, tmp_path):
    words = [f"output={tmp_path}", "finetune.linear_evaluation=true", "optimizer.algorithm=lars"]
    words += ["training.steps=20", "training.validate_every=10", "--rates", "1,0.01"]
    assert main(["search-lr", str(config), "--device", "cpu", *words]) == 0
    with open(tmp_path / "tuned-search" / "search.csv") as file:
        losses = {
            row["learning_rate"]: float(row["validation_loss"]) for row in csv.DictReader(file)
        }
    assert losses["1"] < losses["0.01"]
    tested = json.loads((tmp_path / "tuned-lr-1" / "evaluation" / "finetune_test.json").read_text())
    assert tested["finetune"]["linear_evaluation"]
    assert (tested["seed"], tested["num_train"], tested["num_images"]) == (0, 120, 18)


def test_test_images_must_not_overlap_training(config, capsys, shard_folders):
    test = f"finetune.test={shard_folders}/train"
    assert "its shard-000000.tar has the SHA-256 of the other's" in refused(capsys, config, test)
    chooses = f"finetune.test={shard_folders}/validation"
    assert "cannot evaluate what was trained on" in refused(capsys, config, chooses)


def test_classifier_starts_at_zero_from_scratch(config, tmp_path):
    words = [f"output={tmp_path}", "finetune.from_run=null", "optimizer.learning_rate=1e-9"]
    assert main(["finetune", str(config), "--device", "cpu", *words]) == 0
    lines = (tmp_path / "tuned" / "metrics.jsonl").read_text().splitlines()
    # ln 3 for three classes, before any update.
    assert json.loads(lines[1])["loss"] == pytest.approx(1.0986123, rel=1e-6)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["finetune.num_classes=4"], "has 3 classes; finetune.num_classes is 4"),
        (["finetune.from_run=/nowhere"], "/nowhere does not exist; give a run folder"),
        (["finetune.from_step=7"], "has no checkpoint of step 7; steps here: 2"),
        (
            ["finetune.from_step=7", "finetune.from_run=null"],
            "of finetune.from_run, which is absent",
        ),
        (["model.hidden_size=32"], "was trained with model.hidden_size 16, and this config has 32"),
        (["objective.mode=bert"], "was trained with objective.mode autoregressive"),
        (["data.validation=null"], "data.validation: must name labelled shards"),
        (["training.validate_every=0"], "training.validate_every: must be 1 or more"),
        (["finetune=null"], "has no finetune section"),
        (["finetune.test=/nowhere"], "finetune.test: /nowhere"),
        (
            ["finetune.visibility=full", "finetune.generative_weight=1"],
            "full shows tokens their own targets",
        ),
    ],
)
def test_invalid_configs(config, capsys, words, expected):
    assert expected in refused(capsys, config, *words)


def test_unlabelled_images_are_refused(config, capsys, shard_folders, tmp_path):
    from data_tools.__main__ import main as data_tools

    flat = tmp_path / "flat"
    flat.mkdir()
    for picture in (shard_folders / "images" / "validation").rglob("*.png"):
        shutil.copy(picture, flat / f"{picture.parent.name}-{picture.name}")
    words = ["--palette", str(shard_folders / "palette.npy"), "--size", "4"]
    assert data_tools(["palette", "shards", str(flat), "--out", str(tmp_path / "out"), *words]) == 0
    message = refused(capsys, config, f"data.validation={tmp_path}/out")
    assert "data.validation" in message
    assert "36 images without a label, of 36 in all" in message


def test_palette_of_the_source_is_checked(config, capsys, tmp_path):
    source = tmp_path / "source"
    shutil.copytree(config.parent / "runs" / "source", source)
    manifest = source / "checkpoints" / "step-00000002" / "manifest.json"
    tree = json.loads(manifest.read_text())
    del tree["checksum"]
    tree["tokenizer"] = "0" * 64
    manifest.write_text(json.dumps(tree))
    message = refused(capsys, config, f"finetune.from_run={source}")
    assert "was trained on other tokens than " in message


def test_random_order_needs_the_seed_of_the_source(config, capsys, tmp_path):
    source = tmp_path / "source"
    shutil.copytree(config.parent / "runs" / "source", source)
    tree = yaml.safe_load((source / "config.yaml").read_text())
    tree["objective"]["order"] = "random"
    (source / "config.yaml").write_text(yaml.safe_dump(tree))
    manifest = source / "checkpoints" / "step-00000002" / "manifest.json"
    stored = json.loads(manifest.read_text())
    del stored["checksum"]
    stored["words"]["schedule"]["order"] = "random"
    manifest.write_text(json.dumps(stored))
    words = [f"finetune.from_run={source}", "objective.order=random", "seed=1"]
    assert "was trained with seed 0, which its weights depend on" in refused(capsys, config, *words)


OBJECTIVES = {
    "darl": {"name": "darl", "patch_size": 4, "loss": "diffusion"},
    "compose": {
        "name": "compose",
        "reads": {"kind": "patches", "patch_size": 4},
        "schedule": {"kind": "one_by_one"},
        "asks": {"kind": "shift"},
        "density": {"kind": "diffusion"},
    },
}


@pytest.fixture(scope="module", params=OBJECTIVES)
def diffusion_config(request, image_shards, tmp_path_factory):
    """A fine-tuning config whose source samples by diffusion, and the section of its options."""
    root = tmp_path_factory.mktemp("diffusion")
    parts = ("train", "validation")
    tree = {
        "name": "source",
        "output": f"{root}/runs",
        "objective": OBJECTIVES[request.param],
        "model": {"num_layers": 1, "hidden_size": 16, "num_attention_heads": 2},
        "data": {part: f"{image_shards}/{part}" for part in parts} | {"image_size": 16},
        "parallel": {"zero_stage": 0},
        "optimizer": {"learning_rate": 1e-2},
        "training": {"steps": 1, "batch_size": 8, "validate_every": 1, "sample_every": 0},
    }
    (root / "source.yaml").write_text(yaml.safe_dump(tree))
    assert main(["train", str(root / "source.yaml"), "--device", "cpu"]) == 0
    tree["name"] = "tuned"
    tree["finetune"] = {"from_run": f"{root}/runs/source", "num_classes": 10}
    (root / "tuned.yaml").write_text(yaml.safe_dump(tree))
    return root / "tuned.yaml", "objective.density" * (request.param == "compose") or "objective"


def test_sampling_options_may_differ_from_the_source(diffusion_config, capsys, tmp_path):
    path, section = diffusion_config
    words = [f"{section}.sampling_temperature=0.7", f"{section}.sampling_steps=5"]
    message = refused(
        capsys, path, *words, "finetune.generative_weight=1", f"{section}.noise_b=2.0"
    )
    assert f"was trained with {section}.noise_b 1.0, and this config has 2.0" in message
    # Without the paper's own loss, no noise is drawn.
    words.append(f"{section}.noise_b=2.0")
    words.append(f"output={tmp_path}")
    assert main(["finetune", str(path), "--device", "cpu", *words]) == 0, capsys.readouterr().err


@pytest.mark.parametrize("words", [[], ["parallel.zero_stage=1"]])
def test_same_head_of_the_source_is_trained_further(config, tmp_path, capsys, words):
    shared = [f"output={tmp_path}", "finetune.linear_evaluation=true", *words]

    def classifier(name, *words):
        assert (
            main(["finetune", str(config), "--device", "cpu", *shared, f"name={name}", *words]) == 0
        )
        return read_weights(step_folder(tmp_path / name, 1), "head.classifier.")

    first = classifier("first", "training.steps=1")
    source = [f"finetune.from_run={tmp_path}/first", "training.steps=1"]
    source += ["optimizer.learning_rate=1e-30"]
    capsys.readouterr()
    again = classifier("again", *source)
    assert f"the head continues from {tmp_path}/first/" in capsys.readouterr().out
    assert torch.equal(again["linear.weight"], first["linear.weight"])
    # A tenth of the first batch's statistics is in the one, nearly two tenths are in the other.
    assert again["standardize.mean"].norm() > 1.5 * first["standardize.mean"].norm()
    other = classifier("other", *source, "finetune.read_out=last")
    assert (
        "the head is new: the source has finetune.read_out mean, not last"
        in capsys.readouterr().out
    )
    assert not torch.equal(other["linear.weight"], first["linear.weight"])
