"""`megavis config show --grammar`: the words of a paper take up its runs."""

import json

import pytest
from tiny import VIT, tiny

from megavis.cli import main
from megavis.grammar.words import Categorical, InitialWeights
from megavis.papers.igpt.config import IGPTConfig

IGPT = IGPTConfig.grammar


def in_another_order(config, run):
    """Return iGPT's words but for an order, a density, and what weights do not depend on."""
    words, initial = IGPT(config, run), InitialWeights(blocks="lecun")
    order = words.schedule.model_copy(update={"order": "round_robin"})
    changed = {"schedule": order, "density": Categorical(bias=True), "weights": initial}
    return words.model_copy(update=changed)


pytestmark = pytest.mark.once


def losses(folder):
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return {each["step"]: each["loss"] for each in map(json.loads, lines) if "loss" in each}


@pytest.fixture(scope="module")
def paper(shards, tmp_path_factory):
    """An iGPT in an order of its own, trained for four steps, and its config."""
    folder = tmp_path_factory.mktemp("paper")
    path = folder / "paper.yaml"
    path.write_text(
        tiny(
            "{name: igpt, vocabulary_size: 64, order: random}",
            shards=shards,
            name="whole",
            output=str(folder / "runs"),
            data={"image_size": 8},
            schedule={"decay": "constant"},
            training={"steps": 4, "log_every": 1},
        )
    )
    assert main(["train", str(path), "--device", "cpu"]) == 0
    return path, folder / "runs"


def test_words_resume_the_run_of_a_paper(paper, capsys):
    path, runs = paper
    assert main(["train", str(path), "name=cut", "training.steps=2", "--device", "cpu"]) == 0
    capsys.readouterr()
    assert main(["config", "show", str(path), "name=cut", "--grammar"]) == 0
    as_shown = capsys.readouterr().out
    assert main(["config", "show", str(runs / "cut"), "--grammar"]) == 0
    assert "kind: one_by_one" in capsys.readouterr().out
    words = path.with_name("words.yaml")
    words.write_text(as_shown)
    assert "kind: one_by_one" in words.read_text()
    assert main(["train", str(words), "--device", "cpu"]) == 0
    assert losses(runs / "cut") == losses(runs / "whole")
    changed = ["objective.schedule.order=raster", "training.steps=5", "--device", "cpu"]
    assert main(["train", str(words), *changed]) == 2
    assert "objective.schedule.order random" in capsys.readouterr().err


def test_words_start_from_the_run_of_a_paper(paper, shards, capsys):
    path, runs = paper
    assert main(["config", "show", str(path), "name=tuned", "--grammar"]) == 0
    words = path.with_name("tuned.yaml")
    words.write_text(capsys.readouterr().out)
    tuned = [f"finetune={{num_classes: 10, from_run: {runs}/whole}}", "training.validate_every=4"]
    tuned += [f"data.validation={shards}/validation", "--device", "cpu"]
    assert main(["train", str(words), *tuned]) == 0


def test_weights_are_refused_where_the_paper_means_other_words(
    paper, shards, tmp_path, monkeypatch, capsys
):
    """A `grammar` that is changed in code leaves the keys in config.yaml as they are."""
    path, runs = paper
    run, copy, own = runs / "whole", tmp_path / "copy", tmp_path / "exported"
    assert main(["export", str(run), "--to", "huggingface", str(own)]) == 0
    assert main(["import", "huggingface", str(own), str(copy)]) == 0
    monkeypatch.setattr(IGPTConfig, "grammar", in_another_order)
    tuned = [f"finetune={{num_classes: 10, from_run: {run}}}", "training.validate_every=4"]
    tuned += [f"data.validation={shards}/validation", "name=other", "--device", "cpu"]
    converted = ["checkpoint", "convert", str(run), str(tmp_path / "converted")]
    assert main([*converted, "--tensor", "2"]) == 0
    for command in (
        ["train", str(path), "training.steps=5", "--device", "cpu"],
        ["train", str(path), *tuned],
        ["likelihood", str(run), "--device", "cpu"],
        ["sample", str(copy), "--device", "cpu"],
        ["sample", str(tmp_path / "converted"), "--device", "cpu"],
        ["export", str(run), "--to", "safetensors", str(tmp_path / "weights")],
        ["config", "show", str(run), "--grammar"],
    ):
        capsys.readouterr()
        assert main(command) == 2, command
        said = capsys.readouterr().err
        text = "trained with schedule.order random, not round_robin; density.bias false, not"
        assert f"{text} true: restore the run's config.yaml, or what igpt means in " in said
        assert "papers/igpt/config.py, whose" in said
    assert main(["train", str(path), "training.steps=5", "--dry-run"]) != 0
    assert "schedule.order random, not round_robin" in capsys.readouterr().out


def test_words_of_a_vit_are_exported_as_one(image_shards, tmp_path, capsys):
    words = "reads: {kind: patches, patch_size: 4}, schedule: {kind: masked}, asks: {kind: mask}"
    words += ", density: {kind: squared_error}, condition: {kind: learned_tokens}"
    path = tmp_path / "words.yaml"
    path.write_text(
        tiny(
            f"{{name: compose, {words}}}",
            shards=image_shards,
            name="vit",
            output=str(tmp_path),
            model={**VIT, "positions": "learned"},
            training={"steps": 1},
        )
    )
    assert main(["train", str(path), "--device", "cpu"]) == 0
    for form in ("huggingface", "timm"):
        capsys.readouterr()
        words = ["export", str(tmp_path / "vit"), "--to", form, str(tmp_path / form)]
        assert main(words) == 0, capsys.readouterr().err
    settings = json.loads((tmp_path / "huggingface/config.json").read_text())
    assert (settings["model_type"], settings["patch_size"]) == ("vit", 4)


@pytest.mark.parametrize(
    ("words", "key"),
    [
        (
            "reads: {kind: ids, patch_size: 4, vocabulary_size: 12, tokenizer: missing}, schedule:"
            " {kind: one_by_one}, asks: {kind: shift}, density: {kind: categorical}",
            "reads.tokenizer",
        ),
        (
            "reads: {kind: patches, patch_size: 4}, predicts: {kind: latents, patch_size: 4,"
            " tokenizer: missing}, schedule: {kind: masked}, asks: {kind: mask}, density:"
            " {kind: squared_error}",
            "predicts.tokenizer",
        ),
        (
            "reads: {kind: patches, patch_size: 4}, schedule: {kind: groups, num_groups: 3}, asks:"
            " {kind: query}, density: {kind: squared_error}, condition: {kind: pooled_features,"
            " feature_size: 4, tokenizer: missing}",
            "condition.tokenizer",
        ),
        (
            "reads: {kind: patches, patch_size: 4}, schedule: {kind: one_by_one}, asks: {kind:"
            " shift}, density: {kind: squared_error}, memory: {kind: encoded_image, num_layers: 1,"
            " patch_size: 4, from_run: missing}",
            "memory.from_run",
        ),
    ],
)
def test_a_run_that_is_missing_is_blamed_on_its_key(words, key, image_shards, tmp_path, capsys):
    path = tmp_path / "words.yaml"
    objective = f"{{name: compose, {words}}}"
    path.write_text(tiny(objective, shards=image_shards, output=str(tmp_path / "runs")))
    line = 1 + path.read_text().splitlines().index(f"    {key.rpartition('.')[2]}: missing")
    for more in ([], ["--dry-run"]):
        assert main(["train", str(path), "--device", "cpu", *more]) == 2
        said = "".join(capsys.readouterr())
        assert f"{path}:{line}: objective.{key}: missing " in said
