"""benchmarks/results: raw data, commands, resuming and tables, without training anything."""

import json
import os
import re
import signal
import subprocess
import sys
import tarfile
import time
from pathlib import Path

import pytest
from made_results import (
    made,
    made_classes,
    made_probe,
    made_reconstruction,
    made_samples,
    rows_of,
    write_results,
    write_run,
)

from benchmarks.results import driver, page
from benchmarks.results.__main__ import main, parser
from benchmarks.results.digits import link_digits
from benchmarks.results.sources import Sources, find_sources, shard_tasks
from benchmarks.results.tasks import HELD_OUT, TEST, Study, Task, config_of
from data_tools.__main__ import build_parser
from megavis.cli import read_arguments
from megavis.config.errors import UserError
from megavis.evaluation.results import EnsembleResult, EnsembleRow

pytestmark = pytest.mark.once

ROOT = Path(__file__).parents[2]
CLASSES = ("airplane", "truck")


def class_folders(folder):
    for part in ("train", "test"):
        for name in CLASSES:
            (folder / part / name).mkdir(parents=True)
            (folder / part / name / "0000.jpg").write_bytes(b"x")


def study(*, small=False, **images):
    """Return the study with these numbers of images of CIFAR-10."""
    return Study.read(
        small=small, images={("cifar10", kind): number for kind, number in images.items()}
    )


def all_tasks(made, sources, folder):
    tasks = []
    for method in made.methods:
        tasks += [*shard_tasks(sources, method.reads, folder, small=made.small)]
        tasks += made.trainings(method)
    for method in made.methods:
        tasks += made.tests(method)
    return tasks


def spoken_digits(folder, *, flat=False, speakers=("ann", "bob", "cat")):
    for digit in "37":
        for speaker in speakers:
            for take in (0, 11):
                name = f"{digit}_{speaker}_{take}.wav" if flat else f"{digit}/{speaker}_{take}.wav"
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                (folder / name).write_bytes(name.encode())


@pytest.mark.parametrize("flat", [False, True])
def test_digits_are_linked_with_speakers_held_out(tmp_path, flat):
    raw, folder = tmp_path / "data" / "recordings", tmp_path / "out"
    spoken_digits(raw, flat=flat)
    assert find_sources(tmp_path / "data", tmp_path / "unpacked").digits == raw
    link_digits(raw, folder)
    link_digits(raw, folder)  # already made
    names = sorted(str(path.relative_to(folder)) for path in folder.rglob("*.wav"))
    assert names == [
        f"{d}/{s}_{t}.wav" for d in "37" for s in ("ann", "bob", "cat") for t in (0, 11)
    ]
    assert b"bob_11" in (folder / "7/bob_11.wav").read_bytes()
    for name, speaker in (("validation_list.txt", "bob"), ("testing_list.txt", "cat")):
        listed = (folder / name).read_text().split()
        assert listed == [f"{digit}/{speaker}_{take}.wav" for digit in "37" for take in (0, 11)]


def test_digits_of_two_speakers_are_refused(tmp_path):
    spoken_digits(tmp_path / "raw", speakers=("ann", "bob"))
    with pytest.raises(UserError, match="has spoken digits of 2 speakers; one tests, one chooses"):
        link_digits(tmp_path / "raw", tmp_path / "out")


@pytest.mark.parametrize("depth", ["", "cifar", "packed"])
def test_class_folders_are_found(tmp_path, depth):
    """At the top, one folder below it, and in archives, which are unpacked once."""
    data, unpacked = tmp_path / "data", tmp_path / "unpacked"
    class_folders(data / depth)
    expected = data / depth
    if depth == "packed":
        for part in ("train", "test"):
            with tarfile.open(data / f"cifar10_{part}.tar.xz", "w:xz") as tar:
                tar.add(data / depth / part, part)
            subprocess.run(["rm", "-r", data / depth / part], check=True)
        expected = unpacked
    assert find_sources(data, unpacked) == Sources(expected, True)
    if depth == "packed":
        (unpacked / "train/truck/0000.jpg").unlink()
        assert find_sources(data, unpacked).cifar10 == unpacked
        assert not (unpacked / "train/truck/0000.jpg").exists(), "unpacked again"


def test_authors_files_are_found(tmp_path):
    (tmp_path / "cifar-10-batches-bin").mkdir()
    (tmp_path / "cifar-10-batches-bin/data_batch_1.bin").touch()
    (tmp_path / "mnist_train-images-idx3-ubyte.gz").touch()
    found = find_sources(tmp_path, tmp_path / "unpacked")
    assert found == Sources(tmp_path / "cifar-10-batches-bin", False, tmp_path)


def test_mistakes_in_the_data_folder_are_one_sentence(tmp_path, capsys):
    assert main([str(tmp_path / "nowhere"), "--out", str(tmp_path / "out")]) == 2
    assert "nowhere: no such folder; give the one with the data" in capsys.readouterr().err
    data = tmp_path / "data"
    data.mkdir()
    assert main([str(data), "--out", str(tmp_path / "out")]) == 2
    assert "holds no data set: neither CIFAR-10 (train/ and test/" in capsys.readouterr().err
    (data / "cifar.tar.gz").write_bytes(b"cut off")
    assert main([str(data), "--out", str(tmp_path / "out")]) == 2
    assert "cifar.tar.gz cannot be unpacked" in capsys.readouterr().err


def test_tables_are_written_without_running(tmp_path):
    class_folders(tmp_path / "data")
    out = tmp_path / "out"
    out.mkdir()
    write_run(out, "results_mae", held_out=made_probe(0.4, 0.3, 0.35))
    assert main([str(tmp_path / "data"), "--out", str(out), "--tables"]) == 0
    assert "40.0 % (layer 1)" in (out / "results.md").read_text()
    assert not (out / "study.log").exists()


def test_a_small_study_writes_no_page(tmp_path, capsys):
    words = [str(tmp_path), "--small", "--page", str(tmp_path / "page.md")]
    assert main([*words, "--out", str(tmp_path / "out")]) == 2
    assert "--page and --records are for a whole study" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["0", "-1", "1e5", "many"])
def test_a_count_is_a_number_of_images(text, capsys):
    with pytest.raises(SystemExit):
        parser().parse_args(["data", "--images", text])
    assert "is not a number of images" in capsys.readouterr().err


@pytest.mark.parametrize("small", [False, True])
@pytest.mark.parametrize("has_class_folders", [False, True])
def test_every_command_is_valid(tmp_path, small, has_class_folders):
    made = study(small=small)
    spoken_digits(tmp_path / "raw")
    sources = Sources(Path("raw"), has_class_folders, Path("mnist"), tmp_path / "raw")
    tasks = all_tasks(made, sources, tmp_path / "out")
    data_tools = build_parser()
    for task in tasks:
        if task.words[0] == "megavis":
            assert read_arguments([*task.words[1:]]).run
        else:
            assert data_tools.parse_args([*task.words[1:]]).run
    commands = {str(task): task.done for task in tasks}
    assert len({*commands.values()}) == len(commands), "one command would stand for two"
    folders = {str(done.parent) for done in commands.values()}
    folders |= {f"shards/digits/{part}" for part in ("train", "validation")}
    for method in made.methods:
        for config in map(config_of, filter(None, (method.pretrain, method.finetune))):
            assert {config.data.train_sources[0].path, config.data.validation} <= folders


def test_test_images_come_last():
    """No command that trains or chooses names the test images, not even in its config."""
    made = study()
    for method in made.methods:
        for task in made.trainings(method):
            assert "cifar10/test" not in str(task).replace("cifar10_16", "cifar10")
        for words in filter(None, (method.pretrain, method.finetune)):
            config = config_of(words)
            if method.data == "cifar10":
                assert config.data.validation.endswith("/selection")
                assert not (config.finetune and config.finetune.test)


def test_networks_and_images_are_equal():
    made = study(pretraining=1280, finetuning=640)
    networks, images = set(), {}
    for method in made.methods:
        if method.data != "cifar10" or method.tokenizer:
            continue
        for words in filter(None, (method.pretrain, method.finetune)):
            model = config_of(words).model
            networks.add((model.num_layers, model.hidden_size, model.num_attention_heads))
        if method.pretrain:
            before = config_of(method.finetune).finetune.from_run
            assert before == str(config_of(method.pretrain).folder)
            assert config_of(method.finetune).objective == config_of(method.pretrain).objective
        trained = [task for task in made.trainings(method) if task.steps]
        images[method.name] = [
            task.steps * config_of((task.words[2],)).training.batch_size for task in trained
        ]
    assert networks == {(6, 192, 6)}
    assert images.pop("from scratch") == [640]
    assert images.pop("from scratch, as long as both") == [1920]
    assert {tuple(each) for each in images.values()} == {(1280, 640)}


STUB = """
import sys, time
from pathlib import Path
print("stub", *sys.argv[1:], flush=True)
if "wait" in sys.argv:
    Path("started").touch()
    time.sleep(60)
if "fail" in sys.argv:
    sys.exit("no disk")
if "nothing" not in sys.argv:
    Path(sys.argv[-1]).touch()
"""


@pytest.fixture
def stub(tmp_path, monkeypatch):
    """Let a small program stand for `megavis` and `data_tools`."""
    (tmp_path / "stub_program.py").write_text(STUB)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(driver, "_PROGRAMS", {"megavis": "stub_program"})
    return tmp_path


def task(*words):
    return Task(("megavis", *words), Path(words[-1]))


def test_finished_commands_are_not_repeated(stub):
    said = []
    tasks = [task("one"), task("two")]
    driver.run_tasks(tasks[:1], stub, say=said.append)
    driver.run_tasks(tasks, stub, say=said.append)
    assert said == ["$ megavis one", "$ megavis two"]
    assert "stub two" in (stub / "study.log").read_text()
    times = [json.loads(line) for line in (stub / "times.jsonl").read_text().splitlines()]
    assert [each["done"] for each in times] == ["one", "two"]
    assert all(0 <= each["processor_seconds"] <= each["seconds"] + 1 for each in times)


def training(steps):
    """Return a training of run `a`, of which the stub makes the checkpoint."""
    saved = f"runs/a/checkpoints/step-{steps:08d}"
    return Task(("megavis", "train", saved), Path("runs/a/config.yaml"), Path("runs/a"), steps)


def test_what_has_been_made_anew_is_evaluated_again(stub):
    """A study with more images trains its runs further: old evaluations are of other weights."""
    (stub / "runs/a/checkpoints").mkdir(parents=True)
    (stub / "runs/a/config.yaml").touch()
    probe, likelihood = task("probe", "runs/a", "one"), task("likelihood", "runs/a", "two")
    for steps, is_new in ((10, True), (10, False), (20, True), (20, False)):
        tasks, said = [training(steps), probe, likelihood], []
        driver.run_tasks(tasks, stub, say=said.append)
        assert said == [f"$ {each}" for each in tasks] * is_new
    # A result of the same command with other options is not reused either.
    said.clear()
    more = task("probe", "runs/a", "--train-images", "50000", "one")
    driver.run_tasks([training(20), more, likelihood], stub, say=said.append)
    assert said == ["$ megavis probe runs/a --train-images 50000 one"]


def test_a_training_is_finished_at_its_last_step(stub):
    run = Task(("megavis", "x"), Path("runs/a/config.yaml"), Path("runs/a"), steps=20)
    (stub / "runs/a/checkpoints/step-00000010").mkdir(parents=True)
    (stub / "runs/a/config.yaml").touch()
    assert not run.is_done(stub)
    (stub / "runs/a/checkpoints/step-00000020").mkdir()
    assert run.is_done(stub)


def test_a_failed_command_ends_the_study_with_its_last_lines(stub):
    with pytest.raises(UserError, match=r"(?s)`megavis fail x` ended with exit code 1:.*no disk"):
        driver.run_tasks([task("fail", "x"), task("y")], stub, say=lambda _: None)
    assert not (stub / "y").exists()
    with pytest.raises(UserError, match="ended without .*nothing.* see .*study.log"):
        driver.run_tasks([task("nothing")], stub, say=lambda _: None)


WAITING = """
import sys
from pathlib import Path
from benchmarks.results import driver
from benchmarks.results.tasks import Task
driver._PROGRAMS["megavis"] = "stub_program"
try:
    driver.run_tasks([Task(("megavis", "wait", "x"), Path("x"))], Path.cwd(), say=print)
except driver.InterruptedStudyError as error:
    sys.exit(100 + error.signal)
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_the_command_and_the_study(stub, number):
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{stub}"}
    child = subprocess.Popen([sys.executable, "-c", WAITING], cwd=stub, env=environment)
    end = time.monotonic() + 600
    while not (stub / "started").exists():
        assert time.monotonic() < end
        assert child.poll() is None
        time.sleep(0.02)
    child.send_signal(number)
    assert child.wait(30) == 100 + number
    assert not (stub / "x").exists()


def test_tables_have_the_numbers_of_the_runs(tmp_path):
    assert HELD_OUT.stem == "held_out"
    assert TEST.stem == "test"
    write_run(tmp_path, "results_mae", held_out=made_probe(0.4, 0.3, 0.35))
    write_run(tmp_path, "results_mae_finetune", finetune_test=made_classes(0.61))
    write_run(tmp_path, "results_scratch", finetune_test=made_classes(0.52))
    write_run(
        tmp_path,
        "results_mnist",
        likelihood=made("likelihood.json", bits_per_dimension=0.9, num_images=9),
    )
    (written,) = page.write_page(study(pretraining=1280, finetuning=640), tmp_path, None)
    text = written.read_text()
    rows = rows_of(text)
    assert rows["MAE"] == ["1,280 + 640", "2 + 2", "30.0 %", "40.0 % (layer 1)", "61.0 %"]
    assert rows["from scratch"] == ["640", "2", "", "", "52.0 %"]
    assert rows["raw pixels"][3] == "35.0 %"
    assert "have not been looked at yet" in text
    assert "Linux, 2 CPUs; 2026-11-26; torch 2;\ncommit abc." in text
    assert re.search(r"Not finished yet: DARL, squared error; .*MP3; .*iGPT, masked pixels\.", text)
    assert (tmp_path / "images/results/depth.png").exists()
    # 2 nats of two dimensions are 1 / ln 2 bits of one.
    assert "| iGPT | 64 |  | 1.443 | 500 |" in text
    assert "| iGPT | 64 | 2 | **0.900** | 9 |" in text


def test_test_images_have_columns_of_their_own(tmp_path):
    write_run(
        tmp_path,
        "results_mae",
        held_out=made_probe(0.4, 0.3, 0.35),
        test=made_probe(0.41, 0.3, 0.36),
    )
    tested = EnsembleResult(10000, (EnsembleRow("x", 0.62, 0.9),))
    write_run(tmp_path, "results_mae_finetune", finetune_test=made_classes(0.61), test=tested)
    (written,) = page.write_page(study(), tmp_path, None)
    assert rows_of(written.read_text())["MAE"][-2:] == ["41.0 % (layer 1)", "62.0 %"]
    assert rows_of(written.read_text())["raw pixels"][5] == "36.0 %"
    # A line right below a table would be a row of it.
    assert not re.search(r"^\|.*\n[^|\n]", written.read_text(), re.MULTILINE)


def test_a_run_that_is_training_has_no_date_yet(tmp_path):
    write_run(tmp_path, "results_mnist")
    (tmp_path / "times.jsonl").write_text("")
    (written,) = page.write_page(study(), tmp_path, None)
    assert "Linux, 2 CPUs; torch 2;\ncommit unknown." in written.read_text()


def test_generated_images_are_compared_with_held_out_ones(tmp_path):
    write_run(tmp_path, "results_vae", reconstruction=made_reconstruction(21.5, 0.8, 30.25))
    write_results(tmp_path / "runs/results_vae", held_out=made_samples(12.5, 2000))
    write_run(tmp_path, "results_givt")
    found = study(tokenizer=1600, latents=3200)
    (written,) = page.write_page(found, tmp_path, None)
    assert "Not finished yet: GIVT." in written.read_text()
    write_results(tmp_path / "runs/results_givt", samples=made_samples(80.125, 1000))
    for run, name in (("results_vae", "reconstructions"), ("results_givt", "classes")):
        (tmp_path / f"runs/{run}/evaluation/{name}.png").touch()
    page.write_page(found, tmp_path, None)
    text = written.read_text().partition("<!-- generated -->")[2]
    rows = rows_of(text)
    assert rows["held-out images"] == ["", "", "2,000", "12.5", "0.50", "0.25"]
    assert rows["GIVT, VAE + model"] == ["1,600 + 3,200", "2 + 2", "1,000", "80.1", "0.50", "0.25"]
    assert "21.5 dB, SSIM 0.80; distance to their originals 30.2." in text
    assert (tmp_path / "images/results/results_givt_classes.png").exists()


def test_results_of_another_form_are_refused(tmp_path):
    write_run(tmp_path, "results_mae", held_out=made_probe(0.4, 0.3, 0.35))
    path = tmp_path / "runs/results_mae/evaluation/held_out.json"
    path.write_text(path.read_text().replace('"num_views"', '"views"'))
    with pytest.raises(UserError, match=f"{path} is not a result of .*: `num_views` is missing"):
        page.write_page(study(), tmp_path, None)


def test_seeds_are_a_mean_and_a_deviation(tmp_path):
    for seed, accuracy in enumerate((0.3, 0.34, 0.35)):
        tag = f"_{seed}" if seed else ""
        write_run(tmp_path, f"results_mp3_digits{tag}")
        write_run(
            tmp_path, f"results_mp3_digits_finetune{tag}", finetune_test=made_classes(accuracy)
        )
    (written,) = page.write_page(study(), tmp_path, None)
    part = written.read_text().partition("<!-- digits -->")[2]
    # ((0.3 - 0.33)² + (0.34 - 0.33)² + (0.35 - 0.33)²) / 2 = 0.0007, whose root is 0.0265.
    assert rows_of(part)["MP3"] == ["64,000 + 32,000", "2 + 2", "33.0 ± 2.6 %"]
    (tmp_path / "runs/results_mp3_digits_finetune_2/evaluation/finetune_test.json").unlink()
    page.write_page(study(), tmp_path, None)
    part = written.read_text().partition("<!-- digits -->")[2]
    # The deviation of 0.3 and 0.34 from 0.32 is the root of 2 · 0.02².
    assert rows_of(part)["MP3"][-1] == "32.0 ± 2.8 %, 2 of 3 seeds"


def test_runs_of_a_seed_belong_together():
    methods = [method for method in study().methods if method.data == "digits" and method.pretrain]
    for seed, method in enumerate(methods):
        before, after = config_of(method.pretrain), config_of(method.finetune)
        assert before.seed == after.seed == seed
        assert after.finetune.from_run == str(before.folder)
    assert len({method.pretrained for method in methods}) == len(methods) == 3


def test_records_of_another_machine_are_not_trained_again(tmp_path, capsys):
    """Its tables are those of both; a run on another number of images is none of the study's."""
    class_folders(tmp_path / "data")
    there, here, records = (tmp_path / name for name in ("there", "here", "records"))
    words = [str(tmp_path / "data"), "--tables", "--finetune-images", "256"]
    words += ["--records", str(records), "--out"]
    write_run(there, "results_scratch", finetune_test=made_classes(0.52))
    assert main([*words, str(there)]) == 0
    kept = sorted(str(path.relative_to(records)) for path in records.rglob("*") if path.is_file())
    run = "runs/results_scratch"
    names = ("config.yaml", "evaluation/finetune_test.json", "metrics.jsonl", "starts.jsonl")
    assert kept == [*(f"{run}/{name}" for name in names), "times.jsonl"]
    write_run(here, "results_mae", held_out=made_probe(0.4, 0.3, 0.35))
    for _ in range(2):
        capsys.readouterr()
        assert main([*words, str(here)]) == 0
        assert "from scratch (runs/results_scratch): finished" in capsys.readouterr().out
        rows = rows_of((here / "results.md").read_text())
        assert rows["from scratch"] == ["256", "2", "", "", "52.0 %"]
        assert rows["MAE"][3] == "40.0 % (layer 1)"
    assert len((records / "times.jsonl").read_text().splitlines()) == 1
    words[3] = "512"
    assert main([*words, str(tmp_path / "longer")]) == 0
    assert "52.0 %" not in (tmp_path / "longer/results.md").read_text()


def test_parts_of_a_page_are_replaced(tmp_path):
    own = tmp_path / "docs" / "page.md"
    own.parent.mkdir()
    own.write_text("before\n<!-- cifar10 -->\nold\n<!-- end of cifar10 -->\nafter\n")
    with pytest.raises(UserError, match="must have '<!-- mnist -->' and '<!-- end of mnist -->'"):
        page.write_page(study(), tmp_path, own)
    names = ("mnist", "digits", "generated")
    marks = [f"<!-- {name} --><!-- end of {name} -->\n" for name in names]
    own.write_text(own.read_text() + "".join(marks))
    write_run(tmp_path, "results_mae", held_out=made_probe(0.4, 0.3, 0.35))
    # Drawn by another machine, which has kept its run folders.
    elsewhere = own.parent / "images/results/results_mae_reconstructions.png"
    elsewhere.parent.mkdir(parents=True)
    elsewhere.touch()
    page.write_page(study(), tmp_path, own)
    text = own.read_text()
    assert "](images/results/results_mae_reconstructions.png)" in text
    assert text.startswith("before\n<!-- cifar10 -->\nLinux")
    assert "old" not in text
    assert "\nafter\n" in text
    assert (own.parent / "images/results/depth.png").exists()
