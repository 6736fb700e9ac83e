"""Training refuses invalid requests with one message and exit code 2 before writing anything."""

import errno
import gc
import os
import shutil

import pytest
import yaml

from megavis.cli import main
from megavis.config.errors import UserError
from megavis.config.load import load_config
from megavis.grammar.same_run import check_same_run, source_differences
from megavis.training import run_folder

pytestmark = pytest.mark.once


@pytest.fixture(scope="module")
def config(small_config, tmp_path_factory):
    """Return the config of a finished four-step run."""
    root = tmp_path_factory.mktemp("refusals")
    path = root / "small.yaml"
    path.write_text(
        f"""\
based_on: {small_config}
output: {root}/runs
training: {{steps: 4, log_every: 1}}
checkpoint: {{every: 2}}
"""
    )
    assert main(["train", str(path), "--device", "cpu"]) == 0
    return path


def refusal(capsys, path, *words):
    """Run training, expect exit code 2, and return the message."""
    assert main(["train", str(path), "--device", "cpu", *words]) == 2
    lines = capsys.readouterr().err.splitlines(keepends=True)
    # What the start says may come before.
    message = "".join(line for line in lines if not line.endswith(": on cpu, 1 process\n"))
    assert message.startswith("error: ")
    assert "Traceback" not in message
    return message


def other_palette(shards, target):
    """Write shards of the same images with another palette."""
    import numpy as np

    from data_tools.__main__ import main as data_tools
    from megavis.tokenizers.palette import Palette

    centers = np.random.default_rng(1).uniform(-1, 1, (32, 3)).astype(np.float32)
    Palette(centers).save(target / "palette.npy")
    options = ["--palette", str(target / "palette.npy"), "--size", "4"]
    source = str(shards / "images" / "train")
    assert data_tools(["palette", "shards", source, "--out", str(target / "out"), *options]) == 0
    return target / "out"


def test_restarting_a_finished_run_does_nothing_and_says_so(config, capsys):
    run = config.parent / "runs" / "small"
    files = [run / "metrics.jsonl", run / "config.yaml"]
    before = [file.read_text() for file in files]
    words = ["training.steps=3", "optimizer.learning_rate=0.5"]
    assert main(["train", str(config), "--device", "cpu", *words]) == 0
    assert [file.read_text() for file in files] == before
    assert "small is finished: it has taken 4 steps, and training.steps is 3" in (
        capsys.readouterr().err
    )
    assert gc.isenabled(), "training calls the collector itself, and here took no step"


def test_more_steps_resume_from_the_end(config, tmp_path):
    shutil.copytree(config.parent / "runs" / "small", tmp_path / "small")
    words = [f"output={tmp_path}", "training.steps=6"]
    assert main(["train", str(config), "--device", "cpu", *words]) == 0
    lines = (tmp_path / "small" / "metrics.jsonl").read_text().splitlines()
    assert [yaml.safe_load(line)["step"] for line in lines] == [1, 2, 3, 4, 5, 6]


def test_resume_with_the_palette_in_the_run_folder(config, tmp_path):
    run = tmp_path / "small"
    shutil.copytree(config.parent / "runs" / "small", run)
    before = (run / "palette.npy").read_bytes()
    words = [f"output={tmp_path}", f"data.palette={run / 'palette.npy'}"]
    assert main(["train", str(config), "--device", "cpu", *words]) == 0
    assert (run / "palette.npy").read_bytes() == before


def test_training_data_with_another_palette_is_refused(config, capsys, shard_folders, tmp_path):
    other = other_palette(shard_folders, tmp_path)
    message = refusal(capsys, config, f"data.train={other}", "data.validation=null")
    assert f"{other}: its palette" in message
    assert "choose another name" in message


def test_validation_data_with_another_palette_is_refused(config, capsys, shard_folders, tmp_path):
    other = other_palette(shard_folders, tmp_path)
    message = refusal(capsys, config, f"data.validation={other}", f"output={tmp_path}")
    assert "data.validation" in message
    assert "another palette" in message


def test_mixture_resumes_only_with_the_same_weights(config, capsys, shard_folders):
    def mixture(weight):
        paths = [shard_folders / part for part in ("train", "validation")]
        return (
            f"data.train=[{{path: {paths[0]}, weight: 3}}, {{path: {paths[1]}, weight: {weight}}}]"
        )

    assert main(["train", str(config), "--device", "cpu", "name=mixed", mixture(1)]) == 0
    capsys.readouterr()
    more = ["name=mixed", "training.steps=6"]
    assert "started with data.train weights [3.0, 1.0]" in refusal(
        capsys, config, *more, mixture(2)
    )
    assert main(["train", str(config), "--device", "cpu", *more, mixture(1)]) == 0


@pytest.mark.parametrize(
    ("word", "expected"),
    [
        ("model.num_layers=2", "started with model.num_layers"),
        ("seed=1", "started with seed 0, not 1;"),
        ("objective.order=random", "started with objective.order raster, not random;"),
        ("training.batch_size=16", "started with training.batch_size 8, on which its sample order"),
        ("data.repeats=2", "started with data.repeats 1, on which its sample order"),
        ("data.images_per_class=4", "started with data.images_per_class null, on which its sample"),
        ("data.window_shards=4", "started with data.window_shards null, on which its sample"),
    ],
)
def test_changed_keys_are_refused_on_resume(config, capsys, word, expected):
    assert expected in refusal(capsys, config, word)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["data.image_size=8"], "holds images of 4² pixels; data.image_size is 8"),
        (["objective.vocabulary_size=16"], "palette of 32 colours"),
        (["data.train=/nowhere"], "data.train: /nowhere"),
        (["data.train=[{path: /nowhere, weight: 1}]"], "data.train.0.path: /nowhere"),
        (
            ["objective.vocabulary_size=33", "parallel.tensor_model_parallel_size=2"],
            "33 is not divisible by tensor_model_parallel_size 2",
        ),
        (["training.batch_sise=4"], "did you mean 'batch_size'?"),
        (["objective.mode=bert", "training.sample_every=2"], "has no order of generation"),
    ],
)
def test_invalid_configs_are_refused(config, capsys, tmp_path, words, expected):
    assert expected in refusal(capsys, config, f"output={tmp_path}", *words)
    assert not list(tmp_path.glob("**/metrics.jsonl")), "training must not start"


@pytest.mark.parametrize("computes", [True, False])
def test_fp16_requires_cpu_support(config, capsys, tmp_path, monkeypatch, computes):
    from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator

    # Independent of this machine's CPU: torch can compute in fp16 on any.
    monkeypatch.setattr(CPU_Accelerator, "is_fp16_supported", lambda _: computes)
    words = [f"output={tmp_path}", "training.precision=fp16"]
    if computes:
        assert main(["train", str(config), "--device", "cpu", *words]) == 0
        return
    expected = "training.precision: fp16 needs a GPU, or a CPU that"
    assert expected in refusal(capsys, config, *words)
    assert not list(tmp_path.glob("**/metrics.jsonl")), "training must not start"


def test_truncated_shard_is_refused(config, capsys, shard_folders, tmp_path):
    cut = tmp_path / "cut"
    shutil.copytree(shard_folders / "train", cut)
    shard = next(cut.glob("*.tar"))
    shard.write_bytes(shard.read_bytes()[: shard.stat().st_size // 2])
    message = refusal(capsys, config, f"output={tmp_path}", f"data.train={cut}")
    assert shard.name in message


def flip_a_byte(path):
    content = bytearray(path.read_bytes())
    content[-5] ^= 16
    path.write_bytes(content)


def test_damaged_checkpoint_is_set_aside(config, capsys, tmp_path):
    run = tmp_path / "small"
    shutil.copytree(config.parent / "runs" / "small", run)
    whole = (run / "checkpoints" / "step-00000004" / "manifest.json").read_bytes()
    flip_a_byte(run / "checkpoints" / "step-00000004" / "rank-00000.safetensors")
    assert main(["train", str(config), "--device", "cpu", f"output={tmp_path}"]) == 0
    stderr = capsys.readouterr().err
    assert "step-00000004/rank-00000.safetensors: its SHA-256 differs from the manifest" in stderr
    assert "resuming from" in stderr
    assert (run / "checkpoints" / "step-00000004" / "manifest.json").read_bytes() == whole
    # It is pruned once newer checkpoints are kept.
    assert (run / "checkpoints" / "step-00000004.set-aside").is_dir()
    for step in (2, 4):
        flip_a_byte(run / "checkpoints" / f"step-{step:08d}" / "rank-00000.safetensors")
    before = {p: p.stat().st_mtime_ns for p in (run / "checkpoints").rglob("*")}
    message = refusal(capsys, config, f"output={tmp_path}", "training.steps=6")
    assert "its SHA-256 differs from the manifest" in message
    assert "no older checkpoint is intact" in message
    assert {p: p.stat().st_mtime_ns for p in (run / "checkpoints").rglob("*")} == before


def test_explicit_zero_drop_path_matches_an_absent_one(small_config, tmp_path):
    """Older runs wrote fine-tuning's rate of 0; an absent rate now means the model's."""
    paths = {}
    for name, words in {"old": "drop_path: 0.0", "absent": "", "other": "drop_path: 0.1"}.items():
        paths[name] = tmp_path / f"{name}.yaml"
        section = f"{{num_classes: 3, from_run: elsewhere, {words}}}"
        paths[name].write_text(
            f"based_on: {small_config}\ntraining: {{validate_every: 1}}\nfinetune: {section}\n"
        )
    configs = {name: load_config(path).config for name, path in paths.items()}
    check_same_run(paths["old"], configs["absent"])
    with pytest.raises(UserError, match=r"started with finetune.drop_path 0.0, not 0.1"):
        check_same_run(paths["old"], configs["other"])


def other_images(shards, target, split="validation"):
    """Write shards of other images with the same palette."""
    from data_tools.__main__ import main as data_tools

    options = ["--palette", str(shards / "palette.npy"), "--size", "4"]
    source = str(shards / "images" / split)
    assert data_tools(["palette", "shards", source, "--out", str(target), *options]) == 0
    return target


def test_other_training_data_with_the_same_palette_is_refused(
    config, capsys, shard_folders, tmp_path
):
    """The sample order depends on the images, as the config's other keys of it do."""
    other = other_images(shard_folders, tmp_path / "other")
    words = ["training.steps=6", f"data.train={other}"]
    message = refusal(capsys, config, *words)
    assert (
        f"data.train: {other} with 36 images is not the data that the run's step 4 was" in message
    )
    assert "allow it with data.may_change=true" in message
    assert main(["train", str(config), "--device", "cpu", "--dry-run", *words]) == 2
    checks = capsys.readouterr().out
    assert f"NO  resume: command line: data.train: {other} with 36 images is not" in checks


def test_other_training_data_is_accepted_once_it_is_allowed(config, shard_folders, tmp_path):
    run = tmp_path / "small"
    shutil.copytree(config.parent / "runs" / "small", run)
    other = other_images(shard_folders, tmp_path / "other")
    words = [f"output={tmp_path}", f"data.train={other}"]
    train = ["train", str(config), "--device", "cpu", *words]
    assert main([*train, "training.steps=6", "data.may_change=true"]) == 0
    # From now on that is the run's data.
    assert main([*train, "training.steps=8"]) == 0
    assert main(["train", str(config), "--device", "cpu", words[0], "training.steps=9"]) == 2


def test_the_same_data_in_another_folder_is_accepted(config, shard_folders, tmp_path):
    """Neighbour: a moved data set, or the copy on a node's own disk, is the same data."""
    shutil.copytree(config.parent / "runs" / "small", tmp_path / "small")
    shutil.copytree(shard_folders / "train", tmp_path / "moved")
    words = [f"output={tmp_path}", f"data.train={tmp_path / 'moved'}", "training.steps=6"]
    assert main(["train", str(config), "--device", "cpu", *words]) == 0


def test_a_mixture_with_other_images_in_one_folder_is_refused(
    config, capsys, shard_folders, tmp_path
):
    """Neighbour: of several folders one has changed, or they have changed places."""

    def mixture(*folders):
        return f"data.train=[{', '.join(f'{{path: {folder}, weight: 1}}' for folder in folders)}]"

    first, second = shard_folders / "train", shard_folders / "validation"
    words = ["name=blended", f"output={tmp_path}"]
    assert main(["train", str(config), "--device", "cpu", *words, mixture(first, second)]) == 0
    capsys.readouterr()
    other = other_images(shard_folders, tmp_path / "other", "selection")
    words.append("training.steps=6")
    assert f"{first}, {other} with 156 images" in refusal(
        capsys, config, *words, mixture(first, other)
    )
    assert "is not the data" in refusal(capsys, config, *words, mixture(second, first))
    assert main(["train", str(config), "--device", "cpu", *words, mixture(first, second)]) == 0


def test_a_width_of_the_mlp_that_is_given_or_the_default_is_the_same(config):
    """Imported runs give it, and configs to fine-tune them usually do not."""
    default = load_config(config).config
    given, other = (
        default.model_copy(
            update={"model": default.model.model_copy(update={"ffn_hidden_size": size})}
        )
        for size in (default.model.mlp_size, 8)
    )
    for pair in ((default, given), (given, default)):
        assert list(source_differences(*pair)) == []
    (text,) = source_differences(other, default)
    assert (
        f"was trained with model.ffn_hidden_size 8, and this config has {given.model.mlp_size}"
        in text
    )
    run = given.folder
    check_same_run(run / "config.yaml", given)


def test_a_start_on_a_full_disk_is_one_sentence(config, capsys, monkeypatch):
    """As for the lock, so that SLURM waits before it tries again, and the log names the disk."""
    folder = config.parent / "runs" / "small"

    def full(*_):
        # What `write` to an open file raises has no name.
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(run_folder, "write_atomically", full)
    said = refusal(capsys, config, "training.steps=6")
    assert said == f"error: {folder}: No space left on device\n"
