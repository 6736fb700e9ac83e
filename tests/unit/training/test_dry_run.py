"""Dry runs check on one process whether a job of any size could start."""

import pytest

from megavis.cli import main
from megavis.config.load import load_config
from megavis.training.provenance import read_starts

pytestmark = pytest.mark.once

SHORT = ["training.steps=4", "schedule.warmup_steps=2"]


@pytest.fixture
def lines(capsys):
    def run(path, *words):
        code = main(["train", str(path), "--dry-run", *words])
        return code, capsys.readouterr().out.splitlines()

    return run


@pytest.mark.parametrize(
    ("sizes", "layout"),
    [
        (("tensor_model_parallel_size=4",), "tp4-pp2-zero1"),
        (("tensor_model_parallel_size=2", "context_parallel_size=2"), "tp2-cp2-pp2-zero1"),
    ],
)
def test_dry_run_of_a_16_process_job(lines, tiny_config, sizes, layout):
    words = [f"parallel.{size}" for size in (*sizes, "pipeline_model_parallel_size=2")]
    code, found = lines(tiny_config, "--processes", "16", *words, "name=dry")
    assert code == 0
    topics = ["config", "layout", "data", "needs", "tokenizer", "model", "disk", "resume"]
    assert [line.split(":")[0].split()[1] for line in found] == topics
    assert all(line.startswith("ok ") for line in found)
    assert f"{layout} on 16 processes: 2 of data, each 2 × 2 images per step" in found[1]
    assert "for 8 readers" in found[2]
    # Full tensor sizes although a part of each was built: embedding, blocks, head.
    numbers = (64 + 64 + 1) * 32 + 3 * (12 * 32**2 + 2 * 32) + (1 + 64) * 32
    assert f"{numbers:,} parameters" in found[5]
    assert "process reads from " in found[3]
    assert "starts at step 0" in found[-1]


def test_each_problem_is_one_line(lines, tiny_config, tmp_path):
    code, found = lines(tiny_config, "--processes", "5")
    assert code == 2
    assert found[-1].startswith("NO  layout: ")
    assert "is not divisible by the data-parallel size 5" in found[-1]
    code, found = lines(tiny_config, f"data.train={tmp_path}/nothing")
    assert code == 2
    assert found[-1].startswith("NO  data: command line: data.train: ")
    code, found = lines(tiny_config, "training.steps=1000000000", "checkpoint.keep_every=1")
    assert code == 2
    assert any(line.startswith("NO  disk: 1000000011 checkpoints of ") for line in found)
    # The root user has every right in /proc, and can write nothing.
    code, found = lines(tiny_config, "output=/proc")
    assert code == 2
    (line,) = (line for line in found if line.startswith("NO  disk: "))
    assert line.startswith("NO  disk: /proc: nothing can be written there (")
    assert line.endswith("; name another folder as output")


def test_needs_of_the_data_that_cannot_be_met_are_one_line(lines, tiny_config, tmp_path):
    train = load_config(tiny_config).config.data.train
    remote = [f"data.train=file://{train}", f"data.cache={tmp_path}/cache", "name=remote"]
    code, found = lines(tiny_config, *remote)
    assert code == 0
    assert "; data.cache on each node: one window " in found[3]
    code, found = lines(tiny_config, *remote, "data.cache_gib=0.0001")
    assert code == 2
    assert "data.cache_gib: 0.0001 GiB are too small: all shards are read at once" in found[-1]
    assert found[-1].startswith("NO  data: command line: ")


def test_dry_run_checks_the_checkpoint_to_resume(lines, tiny_config):
    assert main(["train", str(tiny_config), "name=begun", *SHORT]) == 0
    code, found = lines(tiny_config, "name=begun", "--processes", "4")
    assert code == 0
    assert found[-1].endswith("step-00000004: resumes from step 4")
    code, found = lines(tiny_config, "name=begun", "model.num_layers=2")
    assert code == 2
    assert "started with model.num_layers 3, not 2;" in found[-1]
    run_folder = tiny_config.parent / "runs" / "begun"
    assert [start["first_step"] for start in read_starts(run_folder)] == [0], (
        "dry runs must not record a start"
    )
    folder = run_folder / "checkpoints" / "step-00000004"
    file = next(folder.glob("*.safetensors"))
    file.write_bytes(file.read_bytes()[:-1])
    code, found = lines(tiny_config, "name=begun")
    assert code == 2
    assert f"{file}: missing, or not of " in found[-1]


@pytest.mark.parametrize("named", [None, "step-00000009"])
def test_dry_run_finds_the_checkpoint_that_training_would(lines, tiny_config, tmp_path, named):
    """A loss of power may leave no `latest`, or one that names a folder which is gone."""
    words = [f"output={tmp_path}", *SHORT]
    assert main(["train", str(tiny_config), *words]) == 0
    pointer = tmp_path / "tiny" / "checkpoints" / "latest"
    pointer.unlink()
    if named is not None:
        pointer.write_text(named)
    code, found = lines(tiny_config, *words)
    assert (code, found[-1].endswith("step-00000004: resumes from step 4")) == (0, True)


def test_processes_option_requires_dry_run(tiny_config, capsys):
    assert main(["train", str(tiny_config), "--processes", "4"]) == 2
    assert "applies only to --dry-run" in capsys.readouterr().err


def test_what_cannot_be_sampled_is_said_before_training(lines, tiny_config, capsys):
    hidden = (
        "objective={name: compose, reads: {kind: colors, vocabulary_size: 64}, asks: {kind: mask},"
        " schedule: {kind: masked}, density: {kind: categorical}}"
    )
    code, found = lines(tiny_config, hidden, "name=hidden")
    assert code == 0
    text = "this run will generate no images: masked has no order of generation"
    assert found[1].startswith(f"ok  samples: {text}")
    short = ("training.steps=1", "schedule.warmup_steps=0", "data.validation=null")
    assert main(["train", str(tiny_config), hidden, "name=hidden", *short]) == 0
    assert f"WARNING: {text}" in capsys.readouterr().err
    _, found = lines(tiny_config, hidden.replace("masked", "rounds"), "name=rounds")
    assert not any("samples: " in line for line in found)


def test_an_average_that_is_mostly_of_the_start_is_said(lines, tiny_config, capsys):
    """MAR's issue 36: black images from the average of a run that is shorter than its memory."""
    short = ("training.steps=3", "schedule.warmup_steps=0", "data.validation=null")
    text = "optimizer.ema_decay 0.9999 leaves 100 % of the first step's weights in the average"
    code, found = lines(tiny_config, "optimizer.ema_decay=0.9999", "name=averaged", *short)
    assert code == 0
    assert any(line.startswith(f"ok  average: {text} after 3 steps, ") for line in found)
    words = ["train", str(tiny_config), "optimizer.ema_decay=0.9999", "name=averaged", *short]
    assert main(words) == 0
    assert f"WARNING: {text}" in capsys.readouterr().err
    longer = ("training.steps=1000", "schedule.warmup_steps=0", "data.validation=null")
    _, found = lines(tiny_config, "optimizer.ema_decay=0.997", "name=averaged", *longer)
    assert any("leaves 5 % of" in line and line.endswith("; 0.995 leaves 1 %") for line in found)
    _, found = lines(tiny_config, "optimizer.ema_decay=0.995", "name=averaged", *longer)
    assert not any("average: " in line for line in found)


def test_checkpoints_of_frozen_weights_take_less_disk(lines, small_config):
    """Frozen parameters have neither moments nor an average, and LARS has one moment."""
    tuned = "finetune={num_classes: 3, linear_evaluation: true}"
    words = ["model.preset=vit_b", "training.validate_every=1", tuned, "name=linear"]
    _, found = lines(small_config, *words, "optimizer.algorithm=lars")
    (line,) = (line for line in found if " disk: " in line)
    assert " checkpoints of 0.3 GB take " in line, "86 million float32 numbers"
