"""`megavis checkpoint`: list, verify, prune and convert."""

import errno
import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from tiny import tiny

from megavis.checkpoint.format.folder import saved_steps
from megavis.checkpoint.format.manifest import (
    CheckpointManifest,
    LogicalTensor,
    TensorSlice,
    damages,
    read_manifest,
)
from megavis.checkpoint.format.tensor_reader import CheckpointReader
from megavis.checkpoint.state.save import write_tensors
from megavis.cli import main
from megavis.commands import weights
from megavis.config.load import load_config

pytestmark = pytest.mark.once

SHAPES = {"weight/a.weight": (8, 6), "exp_avg/a.weight": (8, 6), "weight/b.bias": (5,)}


def write_step(run, step):
    """Write a checkpoint of three tensors; the matrices are split in two."""
    folder = run / "checkpoints" / f"step-{step:08d}"
    folder.mkdir(parents=True)
    torch.manual_seed(step)
    whole = {key: torch.randn(shape) for key, shape in SHAPES.items()}
    parts = [{key: t[:4].contiguous() for key, t in whole.items() if t.ndim == 2} for _ in (0,)]
    parts.append({key: t[4:].contiguous() for key, t in whole.items() if t.ndim == 2})
    parts[0]["weight/b.bias"] = whole["weight/b.bias"]
    names = ["rank-00000.safetensors", "rank-00001.safetensors"]
    files = {n: write_tensors(folder / n, part) for n, part in zip(names, parts, strict=True)}
    matrix = [TensorSlice(file=names[i], key="", start=4 * i, length=4) for i in (0, 1)]
    tensors = {}
    for key, shape in SHAPES.items():
        if len(shape) == 2:
            slices = tuple(piece.model_copy(update={"key": key}) for piece in matrix)
            tensors[key] = LogicalTensor(shape=shape, dimension=0, slices=slices)
        else:
            slices = (TensorSlice(file=names[0], key=key, start=0, length=shape[0]),)
            tensors[key] = LogicalTensor(shape=shape, dimension=None, slices=slices)
    manifest = CheckpointManifest(
        step=step,
        samples_seen=8 * step,
        optimizer_step=step,
        seed=0,
        tokenizer=None,
        layout={"tensor_model_parallel_size": 2},
        files=files,
        tensors=tensors,
    )
    (folder / "manifest.json").write_text(manifest.model_dump_json())
    (run / "checkpoints" / "latest").write_text(f"{folder.name}\n")
    return folder, whole


@pytest.fixture
def run(tmp_path):
    for step in (2, 4, 6, 8):
        write_step(tmp_path / "run", step)
    return tmp_path / "run"


def test_flipped_bytes_are_detected_and_located(tmp_path):
    """Flip each byte of a file, including its header, and every third byte of the manifest."""
    folder, _ = write_step(tmp_path, 1)
    assert list(damages(folder)) == []
    path = folder / "rank-00001.safetensors"
    content = path.read_bytes()
    start = 8 + int.from_bytes(content[:8], "little")
    header = json.loads(content[8:start])
    for place in range(len(content)):
        flipped = bytearray(content)
        flipped[place] ^= 1 << place % 8
        path.write_bytes(bytes(flipped))
        (found,) = damages(folder)
        for key in ("weight/a.weight", "exp_avg/a.weight"):
            begin, end = header[key]["data_offsets"]
            if begin <= place - start < end:
                assert found.endswith(f": {key}")
    path.write_bytes(content)
    path, content = folder / "manifest.json", (folder / "manifest.json").read_bytes()
    for place in range(0, len(content), 3):
        flipped = bytearray(content)
        flipped[place] ^= 1 << place % 7
        path.write_bytes(bytes(flipped))
        assert list(damages(folder)), f"byte {place}, {content[place : place + 1]}"


def test_list_and_verify(run, capsys):
    assert main(["checkpoint", "list", str(run), "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [row["step"] for row in rows] == [2, 4, 6, 8]
    assert [row["is_latest"] for row in rows] == [False, False, False, True]
    assert rows[0]["layout"] == "tp2-pp1-dp1"
    assert main(["checkpoint", "verify", str(run)]) == 0
    (run / "checkpoints/step-00000004/rank-00000.safetensors").unlink()
    capsys.readouterr()
    assert main(["checkpoint", "list", str(run)]) == 2
    assert "rank-00000.safetensors is missing or cut off" in capsys.readouterr().out
    assert main(["checkpoint", "verify", str(run), "--step", "8"]) == 0
    assert main(["checkpoint", "verify", str(run)]) == 2
    assert "step 4: DAMAGED" in capsys.readouterr().out
    assert main(["checkpoint", "verify", str(run), "--step", "5"]) == 2
    assert "it has 2, 4, 6, 8" in capsys.readouterr().err


def test_verify_goes_on_after_a_file_that_cannot_be_read(run, capsys, monkeypatch):
    """As from a disk with bad blocks, for which the command is made."""
    bad = [run / f"checkpoints/step-0000000{step}" for step in (2, 4)]
    unreadable = {bad[0] / "rank-00001.safetensors", bad[1] / "manifest.json"}
    open_path = Path.open

    def fail(path, *words, **options):
        if path in unreadable:
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))
        return open_path(path, *words, **options)

    monkeypatch.setattr(Path, "open", fail)
    monkeypatch.setattr(Path, "read_bytes", lambda path: path.open("rb").read())
    assert main(["checkpoint", "verify", str(run)]) == 2
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if line.startswith("step")] == [
        "step 2: DAMAGED",
        "step 4: DAMAGED",
        "step 6: every byte is as saved",
        "step 8: every byte is as saved",
    ]
    for path in unreadable:
        assert f"  {path}: cannot be read: Input/output error" in lines


def test_a_checkpoint_that_training_deletes_meanwhile_is_not_damaged(run, capsys, monkeypatch):
    """Training keeps the newest ones, and reading all of them takes long."""
    read = weights.read_manifest

    def read_late(folder):
        if folder.name == "step-00000004":
            shutil.rmtree(folder, ignore_errors=True)
        return read(folder)

    monkeypatch.setattr(weights, "read_manifest", read_late)
    assert main(["checkpoint", "list", str(run), "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [row["step"] for row in rows] == [2, 6, 8]

    check = weights.damages

    def check_late(folder):
        if folder.name == "step-00000006":
            shutil.rmtree(folder)
        return check(folder)

    monkeypatch.setattr(weights, "damages", check_late)
    assert main(["checkpoint", "verify", str(run)]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "step 2: every byte is as saved",
        "step 6: deleted meanwhile",
        "step 8: every byte is as saved",
    ]


def test_prune_keeps_every_nth_step_and_the_newest(run, capsys):
    assert main(["checkpoint", "prune", str(run), "--keep-last", "1", "--keep-every", "4"]) == 0
    assert saved_steps(run) == [4, 8]
    assert "deleted 2 of 4; kept 4, 8" in capsys.readouterr().out


@pytest.mark.parametrize(("tensor", "data", "num_files"), [(1, 1, 1), (4, 1, 4), (2, 2, 4)])
def test_convert_preserves_all_tensors(tmp_path, tensor, data, num_files):
    source, whole = write_step(tmp_path / "run", 3)
    target = tmp_path / "other"
    words = ["checkpoint", "convert", str(tmp_path / "run"), str(target)]
    assert main([*words, "--tensor", str(tensor), "--data", str(data)]) == 0
    folder = target / "checkpoints" / source.name
    assert list(damages(folder)) == []
    manifest = read_manifest(folder)
    assert len(manifest.files) == num_files
    assert manifest.samples_seen == 24
    with CheckpointReader(folder) as reader:
        for key, tensor_ in whole.items():
            assert np.array_equal(reader.read(key).numpy(), tensor_.numpy())
    assert main(words) == 2
    shutil.rmtree(target)
    assert main([*words, "--tensor", "3"]) == 2
    assert not target.exists()


def test_a_damaged_checkpoint_is_not_converted(tmp_path, capsys):
    """The new checksums would be of what was read, so that nothing would find the damage."""
    source, _ = write_step(tmp_path / "run", 3)
    path, target = source / "rank-00001.safetensors", tmp_path / "other"
    content = bytearray(path.read_bytes())
    content[-5] ^= 4
    path.write_bytes(bytes(content))
    assert main(["checkpoint", "convert", str(tmp_path / "run"), str(target)]) == 2
    assert f"{path}: its SHA-256 differs from the manifest" in capsys.readouterr().err
    assert not target.exists()


def test_convert_of_an_older_step_does_not_turn_a_run_back(run, tmp_path):
    """A run that resumed from it would write over its own newer checkpoints."""
    target = tmp_path / "other"
    write_step(target, 5)
    for step, latest in (("4", 5), ("6", 6)):
        assert main(["checkpoint", "convert", str(run), str(target), "--step", step]) == 0
        assert (target / "checkpoints" / "latest").read_text() == f"step-0000000{latest}\n"
    assert saved_steps(target) == [4, 5, 6]


def test_converted_run_is_a_run_of_its_own(tmp_path, capsys):
    run, target = tmp_path / "run", tmp_path / "others" / "split"
    write_step(run, 3)
    (run / "config.yaml").write_text(tiny("{name: igpt, vocabulary_size: 32}", name="run"))
    (run / "palette.npy").write_bytes(b"palette")
    assert main(["checkpoint", "convert", str(run), str(target)]) == 0
    first, copy = (load_config(each / "config.yaml").config for each in (run, target))
    assert copy.folder == target
    names = {"name": "split", "output": str(target.parent)}
    assert copy == first.model_copy(update=names)
    assert (target / "palette.npy").read_bytes() == b"palette"
    assert main(["checkpoint", "convert", str(run), str(tmp_path / "tensor 2")]) == 2
    assert "'tensor 2' does not" in capsys.readouterr().err


def test_a_failed_conversion_keeps_what_another_has_written(tmp_path, monkeypatch, capsys):
    run, target = tmp_path / "run", tmp_path / "other"
    for step in (3, 5):
        write_step(run, step)
    words, convert = ["checkpoint", "convert", str(run), str(target)], weights.conversion.convert

    def fail(*_, **__):
        """Another process converts a step, and then the disk is full."""
        monkeypatch.setattr(weights.conversion, "convert", convert)
        assert main([*words, "--step", "5"]) == 0
        (target / "checkpoints" / ".step-00000003.partial").mkdir()
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(weights.conversion, "convert", fail)
    assert main([*words, "--step", "3"]) == 2
    assert "the result was discarded" in capsys.readouterr().err
    assert main(["checkpoint", "verify", str(target)]) == 0
    assert sorted(each.name for each in (target / "checkpoints").iterdir()) == [
        "latest",
        "step-00000005",
    ]
