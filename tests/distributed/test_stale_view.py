"""A process whose network disk shows an older run folder resumes from the same checkpoint."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from megavis.checkpoint.format.folder import saved_steps
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


@pytest.mark.parametrize("view", [without_newest, before_rollback])
def test_processes_agree_on_the_checkpoint(
    run_job: Callable[..., list[Any]], tmp_path: Path, view: Callable[[Path], CheckpointManifest]
) -> None:
    for step in (1, 2):
        first = write_weights(tmp_path, {"w": torch.ones(2)}, seed=0, tokenizer=None)
        changed = {"step": step, "batches_skipped": 5}
        manifest = read_manifest(first).model_copy(update=changed)
        write_atomically(first / "manifest.json", manifest.model_dump_json().encode())
        first.rename(first.with_name(f"step-{step:08d}"))
    (tmp_path / "checkpoints" / "latest").write_text("step-00000002\n")
    assert run_job(found_by, 2, tmp_path, view) == [(2, 5), (2, 5)]
    assert saved_steps(tmp_path) == [1, 2]
