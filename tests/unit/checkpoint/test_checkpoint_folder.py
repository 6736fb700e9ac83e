"""Checkpoint folders: atomic publishing, pruning, recovery and damage reports."""

import errno
import json
import os
import shutil
import stat
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from megavis.checkpoint.format.folder import (
    checkpoints_by_age,
    latest_checkpoint,
    partial_folder,
    prune,
    publish,
    remove_partial,
    saved_steps,
    step_folder,
)
from megavis.checkpoint.format.manifest import (
    CheckpointManifest,
    LogicalTensor,
    StoredFile,
    TensorSlice,
    read_manifest,
)
from megavis.checkpoint.format.tensor_reader import CheckpointReader
from megavis.checkpoint.state.restore import check_files, newest_intact_checkpoint
from megavis.config.errors import UserError
from megavis.data.format.files import sha256_of_file, write_atomically


def write_checkpoint(run: Path, step: int) -> Path:
    """Publish a checkpoint of one matrix, split by columns over two files."""
    partial = partial_folder(run, step)
    partial.mkdir(parents=True)
    whole = torch.arange(24, dtype=torch.float32).view(4, 6) + step
    files, slices = {}, []
    for rank, part in enumerate(whole.split([2, 4], dim=1)):
        name = f"rank-{rank:05d}.safetensors"
        save_file({"weight/w": part.contiguous()}, partial / name)
        files[name] = StoredFile(
            size=(partial / name).stat().st_size, sha256=sha256_of_file(partial / name)
        )
        start = sum(piece.length for piece in slices)
        slices.append(TensorSlice(file=name, key="weight/w", start=start, length=part.shape[1]))
    manifest = CheckpointManifest(
        step=step,
        samples_seen=step,
        optimizer_step=step,
        seed=0,
        tokenizer=None,
        layout={},
        files=files,
        tensors={"weight/w": LogicalTensor(shape=(4, 6), dimension=1, slices=tuple(slices))},
    )
    write_atomically(partial / "manifest.json", manifest.model_dump_json().encode())
    return publish(run, step)


@pytest.mark.parametrize(("start", "length"), [(0, 6), (0, 2), (1, 3), (3, 3), (5, 1)])
def test_read_any_range_of_a_sliced_tensor(tmp_path, start, length):
    folder = write_checkpoint(tmp_path, 3)
    whole = torch.arange(24, dtype=torch.float32).view(4, 6) + 3
    with CheckpointReader(folder) as reader:
        part = reader.read("weight/w", start, length)
    assert torch.equal(part, whole[:, start : start + length])


def test_partial_checkpoints_are_ignored(tmp_path):
    assert latest_checkpoint(tmp_path) is None
    write_checkpoint(tmp_path, 1)
    newest = write_checkpoint(tmp_path, 2)
    partial_folder(tmp_path, 3).mkdir()
    assert latest_checkpoint(tmp_path) == newest
    assert saved_steps(tmp_path) == [1, 2]


def test_unpublished_checkpoint_is_overwritten(tmp_path):
    write_checkpoint(tmp_path, 1)
    stale = step_folder(tmp_path, 2)
    stale.mkdir()
    (stale / "rank-00000.safetensors").write_bytes(b"old")
    folder = write_checkpoint(tmp_path, 2)
    assert (folder / "manifest.json").exists()
    assert latest_checkpoint(tmp_path) == folder


def test_latest_is_the_step_that_a_run_has_saved(tmp_path):
    """A run that went back passes over the newer checkpoints that it had left."""
    write_checkpoint(tmp_path, 3)
    older = write_checkpoint(tmp_path, 2)
    assert latest_checkpoint(tmp_path) == older


MANIFEST = """{
"version": 1, "step": 7, "samples_seen": 56, "optimizer_step": 7, "seed": 3, "tokenizer": null,
"classes": ["\u00e9"], "losses": {"recent": [2.5, 0.1]}, "layout": {"data_parallel_size": 2},
"files": {"rank-00000.safetensors": {"size": 9, "sha256": "ab"}}, "tensors": {"weight/w":
{"shape": [4, 6], "dimension": null, "slices":
[{"file": "rank-00000.safetensors", "key": "weight/w", "start": 0, "length": 4}]}},
"checksum": "SUM"}
"""
CHECKSUM = "9aea8ea8c95b2bda121ec01e8178d26e8d4264d32bf00777946724747a755aa8"


def test_manifests_written_before_can_be_read(tmp_path):
    """Checkpoints outlive the program. The checksum is of the keys in order, on one line."""
    text = MANIFEST.replace("SUM", CHECKSUM)
    (tmp_path / "manifest.json").write_text(text)
    manifest = read_manifest(tmp_path)
    assert (manifest.step, manifest.classes, manifest.losses.recent) == (7, ("\u00e9",), (2.5, 0.1))
    (tmp_path / "manifest.json").write_text(text.replace("56", "57"))
    with pytest.raises(UserError, match="has changed since it was written"):
        read_manifest(tmp_path)


def test_missing_latest_checkpoint_raises(tmp_path):
    folder = write_checkpoint(tmp_path, 1)
    shutil.move(folder, folder.with_name("step-00000009"))
    with pytest.raises(UserError, match="names step-00000001, which is missing; steps here: 9"):
        latest_checkpoint(tmp_path)


@pytest.mark.parametrize("content", [b"", b"\0\0\0\n", b"\xff\n"])
def test_latest_that_a_loss_of_power_has_damaged_is_reported(tmp_path, content):
    write_checkpoint(tmp_path, 9)
    (tmp_path / "checkpoints" / "latest").write_bytes(content)
    with pytest.raises(UserError, match="latest names no step; steps here: 9"):
        latest_checkpoint(tmp_path)


def test_prune_keeps_every_nth_and_newest_checkpoints(tmp_path):
    for step in range(1, 10):
        write_checkpoint(tmp_path, step)
    prune(tmp_path, keep_last=2, keep_every=4)
    assert saved_steps(tmp_path) == [4, 8, 9]
    left = sorted(p.name for p in (tmp_path / "checkpoints").iterdir())
    assert left == ["latest", "step-00000004", "step-00000008", "step-00000009"]


def test_prune_keeps_regular_and_newest_checkpoints(tmp_path):
    for step in (100, 150, 180, 190, 200, 205):
        write_checkpoint(tmp_path, step)
    prune(tmp_path, keep_last=2, keep_every=0, regular=100)
    assert saved_steps(tmp_path) == [100, 200, 205]


def test_partial_folder_that_cannot_be_deleted_is_left(tmp_path, monkeypatch):
    folders = [partial_folder(tmp_path, step) for step in (3, 4)]
    for folder in folders:
        folder.mkdir(parents=True)
    remove = os.rmdir

    def rmdir(path, **options):
        if Path(path).name == folders[0].name:
            raise OSError(errno.ENOTEMPTY, "Directory not empty")
        remove(path, **options)

    monkeypatch.setattr(os, "rmdir", rmdir)
    remove_partial(tmp_path)
    assert [folder.exists() for folder in folders] == [True, False]


def test_prune_keeps_latest(tmp_path):
    for step in (1, 2, 3):
        write_checkpoint(tmp_path, step)
    (tmp_path / "checkpoints" / "latest").write_text("step-00000001\n")
    prune(tmp_path, keep_last=1, keep_every=0)
    assert saved_steps(tmp_path) == [1, 3]


def test_prune_keeps_those_that_a_run_would_fall_back_to(tmp_path):
    """A kill before `latest` was written has left 300 from before the run resumed at 200."""
    for step in (100, 200, 300, 250):
        write_checkpoint(tmp_path, step)
    prune(tmp_path, keep_last=2, keep_every=0)
    assert [folder.name for folder in checkpoints_by_age(tmp_path)] == [
        "step-00000250",
        "step-00000200",
    ]
    shutil.rmtree(tmp_path)
    for step in (100, 200, 300, 400, 250):
        write_checkpoint(tmp_path, step)
    prune(tmp_path, keep_last=1, keep_every=0, regular=100)
    assert {200, 250} <= set(saved_steps(tmp_path))


def test_a_disk_that_flushes_no_folders_holds_a_run(tmp_path, monkeypatch):
    """Linux answers EINVAL for a folder of VirtualBox or 9p; other errors are of the disk."""
    flush, answer = os.fsync, errno.EINVAL

    def fsync(descriptor):
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            raise OSError(answer, os.strerror(answer))
        flush(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    assert latest_checkpoint(tmp_path) is None
    folder = write_checkpoint(tmp_path, 1)
    assert latest_checkpoint(tmp_path) == folder
    answer = errno.EIO
    with pytest.raises(OSError, match="Input/output error"):
        write_checkpoint(tmp_path, 2)


@pytest.mark.parametrize("named", ["step-00000002", "step-00000009", "", None])
def test_resume_from_latest_or_else_the_newest(tmp_path, context, named):
    """Checkpoints newer than `latest` are unfinished; without `latest` all count as finished."""
    for step in (1, 2, 3):
        write_checkpoint(tmp_path, step)
    pointer = tmp_path / "checkpoints" / "latest"
    pointer.unlink()
    if named is not None:
        pointer.write_text(named)
    found = newest_intact_checkpoint(tmp_path, context)
    assert found is not None
    assert found[1].step == (2 if named == "step-00000002" else 3)
    assert newest_intact_checkpoint(tmp_path / "nothing", context) is None


def test_set_aside_checkpoint_is_pruned_after_newer_ones(tmp_path, context):
    for step in (1, 2, 3):
        folder = write_checkpoint(tmp_path, step)
    (folder / "manifest.json").write_bytes(b"\xff{")
    found = newest_intact_checkpoint(tmp_path, context)
    assert found is not None
    assert found[1].step == 2
    assert latest_checkpoint(tmp_path) == found[0]
    assert saved_steps(tmp_path) == [1, 2]
    for step in (3, 4, 5):
        prune(tmp_path, keep_last=2, keep_every=0)
        assert (tmp_path / "checkpoints" / "step-00000003.set-aside").is_dir()
        write_checkpoint(tmp_path, step)
    prune(tmp_path, keep_last=2, keep_every=0)
    assert not (tmp_path / "checkpoints" / "step-00000003.set-aside").exists()


def test_check_files_detects_flipped_bytes(tmp_path, context):
    folder = write_checkpoint(tmp_path, 1)
    path = folder / "rank-00001.safetensors"
    content = path.read_bytes()
    check_files(folder, context)
    for place in range(0, len(content), 7):
        damaged = bytearray(content)
        damaged[place] ^= 1
        path.write_bytes(damaged)
        with pytest.raises(UserError, match=r"rank-00001\.safetensors: its SHA-256"):
            check_files(folder, context)


def test_truncated_or_missing_file_is_reported(tmp_path, context):
    folder = write_checkpoint(tmp_path, 1)
    path = folder / "rank-00000.safetensors"
    path.write_bytes(path.read_bytes()[:-3])
    with pytest.raises(UserError, match="rank-00000.safetensors: has .* it was truncated"):
        check_files(folder, context)
    path.unlink()
    with pytest.raises(UserError, match="rank-00000.safetensors: missing"):
        check_files(folder, context)


def test_damaged_manifest_is_reported(tmp_path):
    folder = write_checkpoint(tmp_path, 1)
    content = json.loads((folder / "manifest.json").read_text())
    content["step"] = 2
    (folder / "manifest.json").write_text(json.dumps(content))
    with pytest.raises(UserError, match="its content has changed since it was written"):
        read_manifest(folder)
    del content["checksum"]  # as in checkpoints of earlier versions
    content["step"] = "three"
    (folder / "manifest.json").write_text(json.dumps(content))
    with pytest.raises(UserError, match="damaged at step"):
        read_manifest(folder)
    (folder / "manifest.json").write_text("{")
    with pytest.raises(UserError, match="damaged"):
        read_manifest(folder)
    (folder / "manifest.json").unlink()
    with pytest.raises(UserError, match="the checkpoint is incomplete"):
        read_manifest(folder)


def test_pickles_are_refused(tmp_path, context):
    """A pickle file is refused by its hash and by the safetensors header check."""
    folder = write_checkpoint(tmp_path, 1)
    path = folder / "rank-00000.safetensors"
    torch.save({"weight/w": torch.ones(4, 2)}, path)
    with pytest.raises(UserError):
        check_files(folder, context)
    with pytest.raises(Exception, match="header"), CheckpointReader(folder) as reader:
        reader.read("weight/w")
