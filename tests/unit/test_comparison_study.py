"""benchmarks/comparison: commands, what is equal, table and records, without training anything."""

import dataclasses
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
from made_results import made, made_classes, made_probe, rows_of, write_run
from PIL import Image

from benchmarks.comparison.__main__ import main
from benchmarks.comparison.page import write_page
from benchmarks.comparison.study import CLASSES, PARTS, Study
from benchmarks.results.tasks import config_of
from data_tools.__main__ import build_parser
from megavis.cli import read_arguments

pytestmark = pytest.mark.once

PAGE = Path(__file__).parents[2] / "docs" / "comparison.md"
# DARL by squared error and GVP predict means; the page says so of each.
WITHOUT_SAMPLES = {"DARL, squared error", "GVP"}


def commands(study):
    """Return all tasks of a study, in order; those that several methods need once."""
    every = [(*study.shards(each), *study.trainings(each)) for each in study.methods]
    return list(dict.fromkeys(task for tasks in every for task in tasks))


def named(study, name):
    return [method for method in study.methods if method.name == name]


def test_every_command_is_valid_and_reads_what_is_there():
    study, data_tools, there = Study.read(small=True), build_parser(), set()
    for task in commands(study):
        if task.words[0] == "megavis":
            assert read_arguments([*task.words[1:]]).run
        else:
            assert data_tools.parse_args([*task.words[1:]]).run
        made_here = {str(each) for each in (task.done, *task.done.parents)}
        read = {word for word in task.words if re.match(r"(shards|runs)/", word)}
        assert read <= there | made_here, task
        there |= made_here
    dones = [task.done for task in commands(study)]
    assert len({*dones}) == len(dones), "one command would stand for two"


def test_shards_of_every_config_are_made():
    study = Study.read()
    folders = {str(task.done.parent) for task in commands(study)}
    for method in study.methods:
        for config in map(config_of, filter(None, (method.pretrain, method.finetune))):
            wanted = {config.data.train_sources[0].path, config.data.validation}
            wanted |= {config.finetune.test} if config.finetune else set()
            assert wanted <= folders
            assert wanted <= {str(method.reads / part) for part in PARTS}


def test_networks_images_and_recipes_are_equal():
    study = Study.read()
    networks, recipes, seen = set(), set(), set()
    for method in study.methods:
        for words in filter(None, (method.pretrain, method.finetune)):
            config = config_of(words)
            model, training = config.model, config.training
            networks.add((model.num_layers, model.hidden_size, model.num_attention_heads))
            rates = (config.optimizer.learning_rate, bool(config.finetune))
            recipes.add((training.batch_size, config.schedule.decay, config.data.flip, *rates))
        trained = [task for task in study.trainings(method) if task.steps]
        seen.add(tuple(task.steps * 32 for task in trained))
    assert networks == {(4, 128, 4)}
    assert recipes == {(32, "cosine", False, 0.002, False), (32, "cosine", False, 0.001, True)}
    assert seen == {(25600, 12800), (12800,)}


def test_runs_of_a_seed_belong_together():
    study = Study.read()
    for method in study.methods:
        after = config_of(method.finetune)
        assert after.seed == method.seed
        if method.pretrain:
            before = config_of(method.pretrain)
            assert before.seed == method.seed
            assert after.finetune.from_run == str(before.folder)
            assert after.objective == before.objective
        else:
            assert after.finetune.from_run is None
    runs = [run for method in study.methods for run in method.runs]
    assert len({*runs}) == len(runs)
    assert [method.seed for method in named(study, "MAE")] == [0, 1, 2]


def test_methods_that_can_generate_do_and_the_page_says_why_others_do_not():
    text = PAGE.read_text(encoding="utf-8").partition("## What a paper cannot do")[2]
    for method in Study.read(small=True).methods:
        if not method.pretrain:
            continue
        config = config_of(method.pretrain)
        can = config.objective.cannot_generate(config) is None
        assert method.generates == (can and method.name not in WITHOUT_SAMPLES), method.name
        words = re.split(", | ", method.name)[0]
        row = re.search(rf"^\| .*\b{words}\b.* \|", text, re.MULTILINE)
        if not method.generates:
            assert row, method.name


def write_method(folder, name, seed, probe, tuned, **results):
    tag = f"_{seed}" if seed else ""
    found = {"probe": made_probe(probe, 0.1, 0.25), **results}
    write_run(folder, f"comparison_{name}{tag}", step=800, **found)
    write_run(
        folder,
        f"comparison_{name}_finetune{tag}",
        step=400,
        finetune_test=made_classes(tuned),
    )


def test_the_table_has_the_numbers_and_samples_of_the_runs(tmp_path):
    write_method(tmp_path, "mae", 0, 0.4, 0.5)
    write_method(tmp_path, "mae", 1, 0.5, 0.7)
    write_run(tmp_path, "comparison_scratch", finetune_test=made_classes(0.2))
    recognised = made("classes.json")
    recognised = dataclasses.replace(
        recognised,
        samples=dataclasses.replace(recognised.samples, overall=0.75),
        reconstructions=dataclasses.replace(recognised.reconstructions, overall=0.5),
    )
    for seed in (0, 1):
        write_method(tmp_path, "rar", seed, 0.3, 0.6, classes=recognised)
    samples = tmp_path / "runs/comparison_rar/samples/images.npz"
    samples.parent.mkdir()
    shades = np.arange(CLASSES, dtype=np.uint8)[:, None, None, None]
    np.savez(samples, arr_0=np.broadcast_to(shades, (CLASSES, 32, 32, 3)))
    (written,) = write_page(Study.read(), tmp_path, None)
    text = written.read_text()
    rows = rows_of(text)
    # Half of the difference, times the root of 2.
    means = ["45.0 ± 7.1 %, 2 of 3 seeds (layer 1, 1)", "60.0 ± 14.1 %, 2 of 3 seeds"]
    untrained = "10.0 ± 0.0 %, 2 of 3 seeds"
    assert rows["MAE"] == ["25,600 + 12,800", "2 + 2", untrained, *means]
    assert rows["from scratch"][:5] == ["12,800", "2", "", "", "20.0 %, 1 of 3 seeds"]
    name = "images/comparison/comparison_rar.png"
    assert rows["RAR"][-2:] == ["75.0 ± 0.0 %, 2 of 3 seeds", f"![RAR: samples]({name})"]
    assert rows["raw pixels"][3] == "25.0 %"
    # The classifier of each seed.
    assert rows["letters in unseen fonts"][5] == "100.0 ± 0.0 %"
    assert rows["the same through the VQGAN"][5] == "50.0 ± 0.0 %"
    assert "the same through the VAE" not in rows
    assert re.search(r"Not finished yet: DARL, squared error; .*; iGPT, masked pixels\.", text)
    strip = np.asarray(Image.open(tmp_path / name))
    assert strip.shape == (32, 8 * 34 - 2, 3)
    assert {*strip[17, :, 0]} == {*range(8), 255}, "the first eight images between white lines"


def test_pictures_stay_on_a_machine_that_has_not_drawn_them(tmp_path):
    there, here = tmp_path / "there", tmp_path / "here"
    write_method(there, "mae", 0, 0.4, 0.5)
    drawn = there / "runs/comparison_mae/evaluation/reconstructions.png"
    Image.new("RGB", (4, 4)).save(drawn)
    page = tmp_path / "docs/comparison.md"
    page.parent.mkdir()
    shutil.copy(PAGE, page)
    records = ["--tables", "--records", str(tmp_path / "records"), "--page", str(page)]
    assert main([*records, "--out", str(there)]) == 0
    first = page.read_text()
    assert "images/comparison/comparison_mae_reconstructions.png" in first
    assert main([*records, "--out", str(here)]) == 0
    assert page.read_text() == first
    assert (here / "runs/comparison_mae/evaluation/probe.json").exists()
    assert not (here / "runs/comparison_mae/evaluation/reconstructions.png").exists()


def test_what_another_machine_has_finished_is_not_trained_again(tmp_path, capsys):
    there, records = tmp_path / "there", tmp_path / "records"
    write_method(there, "mae", 1, 0.4, 0.5)
    write_run(there, "comparison_scratch", step=200, finetune_test=made_classes(0.2))
    words = ["--tables", "--records", str(records)]
    assert main([*words, "--out", str(there)]) == 0
    capsys.readouterr()
    assert main([*words, "--out", str(tmp_path / "here")]) == 0
    said = capsys.readouterr().out
    assert "MAE (runs/comparison_mae_finetune_1): finished, by" in said
    assert "from scratch" not in said, "it has seen half of the images"


def test_a_page_is_tried_before_hours_of_work(tmp_path, capsys, monkeypatch):
    ran = []
    monkeypatch.setattr("benchmarks.results.command.run_tasks", lambda *_, **__: ran.append(1))
    words = ["--page", str(tmp_path / "page.md"), "--out", str(tmp_path / "out")]
    assert main(words) == 2
    assert capsys.readouterr().err == (
        f"error: {tmp_path}/page.md: there is no such page; make a file with the lines"
        " '<!-- letters -->' and '<!-- end of letters -->', and those of other parts\n"
    )
    (tmp_path / "page.md").write_text("<!-- letters -->\n<!-- end of letters -->\n")
    assert main(words) == 2
    assert "must have '<!-- pictures -->'" in capsys.readouterr().err
    assert not ran


def test_a_small_study_writes_no_page(tmp_path, capsys):
    words = ["--small", "--page", str(tmp_path / "page.md"), "--out", str(tmp_path / "out")]
    assert main(words) == 2
    assert "--page and --records are for a whole study" in capsys.readouterr().err
