"""A process whose network disk shows an older run folder resumes from the same checkpoint."""

import shutil
import socket
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megavis.checkpoint.format.folder import saved_steps, step_folder
from megavis.checkpoint.format.manifest import CheckpointManifest, read_manifest
from megavis.checkpoint.state import restore
from megavis.checkpoint.state.restore import newest_intact_checkpoint
from megavis.checkpoint.state.save import write_weights
from megavis.config.errors import UserError
from megavis.data.format.files import write_atomically
from megavis.parallel.context import close_context, open_context
from megavis.parallel.launch import Launch

pytestmark = pytest.mark.once


def found_by(launch: Launch, run: Path, view: Callable[[Path], CheckpointManifest]) -> Any:
    """Return step and skipped batches of the checkpoint that this process would resume from."""
    with pytest.MonkeyPatch.context() as patch:
        if launch.rank == 1:
            patch.setattr(restore, "read_manifest", view)
        found = newest_intact_checkpoint(run, open_context(launch, device="cpu"))
        close_context()
    assert found is not None
    return found[1].step, found[1].batches_skipped


def without_newest(folder: Path) -> CheckpointManifest:
    if folder.name == "step-00000002":
        raise UserError(f"{folder}/manifest.json: missing, so the checkpoint is incomplete")
    return read_manifest(folder)


def before_rollback(folder: Path) -> CheckpointManifest:
    return read_manifest(folder).model_copy(update={"batches_skipped": 0})


def write_two_steps(run: Path) -> None:
    for step in (1, 2):
        first = write_weights(run, {"w": torch.ones(2)}, seed=0, tokenizer=None)
        changed = {"step": step, "batches_skipped": 5}
        manifest = read_manifest(first).model_copy(update=changed)
        write_atomically(first / "manifest.json", manifest.model_dump_json().encode())
        first.rename(first.with_name(f"step-{step:08d}"))
    (run / "checkpoints" / "latest").write_text("step-00000002\n")


@pytest.mark.parametrize("view", [without_newest, before_rollback])
def test_processes_agree_on_the_checkpoint(
    run_job: Callable[..., list[Any]], tmp_path: Path, view: Callable[[Path], CheckpointManifest]
) -> None:
    write_two_steps(tmp_path)
    assert run_job(found_by, 2, tmp_path, view) == [(2, 5), (2, 5)]
    assert saved_steps(tmp_path) == [1, 2]


def found_with_late_file(launch: Launch, run: Path, looks: int) -> Any:
    """Return the step found, or the error, if rank 1 misses each file in its first looks."""
    exists, missed = Path.exists, []

    def late(path: Path, **options: bool) -> bool:
        if "step-00000002" in path.parts and path.suffix == ".safetensors" and len(missed) < looks:
            missed.append(path)
            return False
        return exists(path, **options)

    context = open_context(launch, device="cpu")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(restore, "STALE_SECONDS", 1.0)
        patch.setattr(restore, "_LOOK_SECONDS", 0.05)
        if launch.rank == 1:
            patch.setattr(Path, "exists", late)
        try:
            found = newest_intact_checkpoint(run, context)
        except OSError as error:
            return str(error)
        finally:
            close_context()
    assert found is not None
    return found[1].step


@pytest.mark.parametrize("looks", [4, 10**6])
def test_file_that_one_node_does_not_see_is_not_damaged(
    run_job: Callable[..., list[Any]], tmp_path: Path, looks: int
) -> None:
    write_two_steps(tmp_path)
    # The only file is the share of rank 0; rank 1 needs one of its own.
    folder = tmp_path / "checkpoints" / "step-00000002"
    manifest = read_manifest(folder)
    (name, stored) = next(iter(manifest.files.items()))
    shutil.copy(folder / name, folder / "zz.safetensors")
    files = {name: stored, "zz.safetensors": stored}
    changed = manifest.model_copy(update={"files": files})
    write_atomically(folder / "manifest.json", changed.model_dump_json().encode())
    results = run_job(found_with_late_file, 2, tmp_path, looks)
    assert saved_steps(tmp_path) == [1, 2]
    if looks == 4:
        assert results == [2, 2]
    else:
        assert results[0] == results[1]
        assert "zz.safetensors: missing" in results[0]
        assert f"looks from {socket.gethostname()}, while" in results[0]


def loaded_from(launch: Launch, run: Path) -> float:
    """Return the weight that a process loads that has chosen the checkpoint of its own rank."""
    weight = torch.nn.Parameter(torch.zeros(1))
    layers: Any = SimpleNamespace(
        named_parameters=lambda: [("w", weight)], named_buffers=lambda: []
    )
    context = open_context(launch, device="cpu")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(restore, "STALE_SECONDS", 1.0)
        restore.load_weights(step_folder(run, 2 - launch.rank), layers, context)
    close_context()
    return float(weight.detach())


def test_processes_load_the_checkpoint_that_the_main_one_has_chosen(
    run_job: Callable[..., list[Any]], tmp_path: Path
) -> None:
    """A run that still trains may publish another while the processes of a job look."""
    for step in (1, 2):
        weights = {"w": torch.full((1,), float(step))}
        write_weights(tmp_path, weights, seed=0, tokenizer=None, trained=(step, step))
    assert run_job(loaded_from, 2, tmp_path) == [2.0, 2.0]
