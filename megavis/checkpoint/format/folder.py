"""The `checkpoints/` folder of a run: names, `latest`, atomic publication, pruning."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Collection, Sequence
from pathlib import Path

from megavis.config.errors import UserError
from megavis.data.format.files import flush_folder, write_atomically

_STEP = re.compile(r"step-(\d{8,})")
_ASIDE = ".set-aside"


def step_folder(run_folder: Path, step: int) -> Path:
    """Return where the checkpoint of a step lives."""
    return run_folder / "checkpoints" / f"step-{step:08d}"


def partial_folder(run_folder: Path, step: int) -> Path:
    """Return where the checkpoint of a step is written before it appears."""
    return run_folder / "checkpoints" / f".step-{step:08d}.partial"


def latest_checkpoint(run_folder: Path) -> Path | None:
    """Return the checkpoint that `latest` names; None where the run has none yet.

    Raises:
        UserError: when `latest` names a folder that is not there.
    """
    pointer = run_folder / "checkpoints" / "latest"
    if not pointer.exists():
        return None
    folder = pointer.parent / pointer.read_text().strip()
    if not folder.is_dir():
        existing = ", ".join(str(step) for step in saved_steps(run_folder)) or "none"
        raise UserError(f"{pointer}: names {folder.name}, which is missing; steps here: {existing}")
    return folder


def saved_steps(run_folder: Path) -> list[int]:
    """Return the steps of all checkpoints, oldest first."""
    folder = run_folder / "checkpoints"
    names = [entry.name for entry in folder.iterdir()] if folder.is_dir() else []
    return sorted(int(match.group(1)) for name in names if (match := _STEP.fullmatch(name)))


def require_run_folder(folder: Path) -> None:
    """Raise UserError where a folder holds no run."""
    if not (folder / "config.yaml").exists():
        raise UserError(f"{folder} is not a run folder: it holds no config.yaml")


def chosen_checkpoint(run_folder: Path, step: int | None = None) -> Path:
    """Return the checkpoint of a step; the newest one where no step is given.

    Raises:
        UserError: the folder holds no run, or no such checkpoint.
    """
    require_run_folder(run_folder)
    if step is None:
        newest = latest_checkpoint(run_folder)
        if newest is None:
            raise UserError(f"{run_folder} has no checkpoint yet")
        return newest
    steps = saved_steps(run_folder)
    if step not in steps:
        existing = ", ".join(map(str, steps)) or "none"
        raise UserError(f"{run_folder} has no checkpoint of step {step}; steps here: {existing}")
    return step_folder(run_folder, step)


def checkpoints_by_age(run_folder: Path, *, up_to: int | None = None) -> list[Path]:
    """Return what a run may resume from, newest first: what `latest` names, and older ones.

    All that are there, where `latest` is missing or does not name one of them; those up to a step,
    where one is given.
    """
    steps = [step for step in saved_steps(run_folder) if up_to is None or step <= up_to]
    folders = [step_folder(run_folder, step) for step in reversed(steps)]
    pointer = run_folder / "checkpoints" / "latest"
    named = pointer.read_text(errors="replace").strip() if pointer.exists() else ""
    names = [folder.name for folder in folders]
    return folders[names.index(named) :] if named in names else folders


def set_aside(run_folder: Path, folders: Sequence[Path], *, newest: Path) -> None:
    """Rename checkpoints that no run may resume from; the newest good one becomes the latest."""
    write_atomically(run_folder / "checkpoints" / "latest", f"{newest.name}\n".encode())
    for folder in folders:
        target = folder.with_name(folder.name + _ASIDE)
        shutil.rmtree(target, ignore_errors=True)
        os.rename(folder, target)


def remove_partial(run_folder: Path) -> None:
    """Delete what a killed process was still writing; nobody else writes into the run now."""
    for folder in (run_folder, run_folder / "checkpoints"):
        for path in folder.glob(".*.partial*"):
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink()


def publish(run_folder: Path, step: int) -> Path:
    """Make a completely written checkpoint appear, and `latest` name it, in this order."""
    target = step_folder(run_folder, step)
    if target.exists():
        # Left by a run that was killed before `latest` named it, and has come here again.
        shutil.rmtree(target)
    os.rename(partial_folder(run_folder, step), target)
    flush_folder(target.parent)
    write_atomically(target.parent / "latest", f"{target.name}\n".encode())
    return target


def prune(
    run_folder: Path, *, keep_last: int, keep_every: int, keep_at: Collection[int] = ()
) -> None:
    """Delete all but the newest `keep_last` checkpoints, every `keep_every`-th and `keep_at`.

    Those that were set aside go when they are older than the ones that are kept.
    """
    latest = latest_checkpoint(run_folder)
    steps = saved_steps(run_folder)
    for folder in (run_folder / "checkpoints").glob(f"step-*{_ASIDE}"):
        if folder.name < step_folder(run_folder, steps[-keep_last:][0]).name:
            shutil.rmtree(folder)
    for step in steps[:-keep_last]:
        folder = step_folder(run_folder, step)
        if (keep_every and step % keep_every == 0) or step in keep_at or folder == latest:
            continue
        # Renamed first: a checkpoint is there completely or not at all, also while it goes.
        doomed = partial_folder(run_folder, step)
        shutil.rmtree(doomed, ignore_errors=True)
        os.rename(folder, doomed)
        shutil.rmtree(doomed)
