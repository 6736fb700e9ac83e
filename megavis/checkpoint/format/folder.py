"""The `checkpoints/` folder of a run: names, `latest`, atomic publishing and pruning."""

from __future__ import annotations

import json
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
    """Return the folder of a step's checkpoint."""
    return run_folder / "checkpoints" / f"step-{step:08d}"


def partial_folder(run_folder: Path, step: int) -> Path:
    """Return the temporary folder in which a step's checkpoint is written."""
    return run_folder / "checkpoints" / f".step-{step:08d}.partial"


def latest_checkpoint(run_folder: Path) -> Path | None:
    """Return the checkpoint that `latest` names, or None if there is none yet.

    Raises UserError if it names none, or one that does not exist.
    """
    pointer = _pointer(run_folder)
    if not pointer.exists():
        return None
    name = _named(pointer)
    is_step = _STEP.fullmatch(name) is not None
    if is_step and (pointer.parent / name).is_dir():
        return pointer.parent / name
    what = f"{name}, which is missing" if is_step else "no step"
    existing = ", ".join(map(str, saved_steps(run_folder))) or "none"
    raise UserError(f"{pointer} names {what}; steps here: {existing}")


def _pointer(run_folder: Path) -> Path:
    return run_folder / "checkpoints" / "latest"


def _named(pointer: Path) -> str:
    # A loss of power may leave any bytes.
    return pointer.read_text(errors="replace").strip() if pointer.exists() else ""


def saved_steps(run_folder: Path) -> list[int]:
    """Return the steps of all checkpoints, oldest first."""
    folder = run_folder / "checkpoints"
    names = [entry.name for entry in folder.iterdir()] if folder.is_dir() else []
    return sorted(int(match.group(1)) for name in names if (match := _STEP.fullmatch(name)))


def require_run_folder(folder: Path) -> None:
    """Raise UserError if `folder` is not a run folder."""
    if not folder.exists():
        raise UserError(f"{folder} does not exist; give a run folder")
    if not (folder / "config.yaml").exists():
        text = f"{folder} is not a run folder: it has no config.yaml"
        if (folder / "config.json").exists():
            text += f"; import it with megavis import huggingface {folder} runs/NAME"
        raise UserError(text)


def chosen_checkpoint(run_folder: Path, step: int | None = None) -> Path:
    """Return the checkpoint of a step, by default the best of `training.patience`, or the latest.

    Raises UserError without one.
    """
    require_run_folder(run_folder)
    best, why = (early_stopped_step(run_folder) if step is None else None), ""
    if best is not None:
        step, why = best, ", which early stopping chose"
    if step is None:
        newest = latest_checkpoint(run_folder)
        if newest is None:
            raise UserError(f"{run_folder} has no checkpoint yet")
        return newest
    steps = saved_steps(run_folder)
    if step not in steps:
        existing = ", ".join(map(str, steps)) or "none"
        raise UserError(
            f"{run_folder} has no checkpoint of step {step}{why}; steps here: {existing}"
        )
    return step_folder(run_folder, step)


def finetuned_step(run_folder: Path) -> int | None:
    """Return the step that a finished fine-tuning run has chosen; None if there is no result.

    Raises UserError if the result does not name one.
    """
    return _step_in(finetuning_file(run_folder))


def finetuning_file(run_folder: Path) -> Path:
    """Return the file that names the step a finished fine-tuning run has chosen, and its score."""
    return run_folder / "evaluation" / "finetune_test.json"


def watched_file(run_folder: Path) -> Path:
    """Return the file of what `megavis evaluate watch` has measured, a line per checkpoint."""
    return run_folder / "evaluation" / "watch.jsonl"


def early_stopping_file(run_folder: Path) -> Path:
    """Return the file that names the best step of pre-training with `training.patience`."""
    return run_folder / "evaluation" / "early_stopping.json"


def early_stopped_step(run_folder: Path) -> int | None:
    """Return the best step of pre-training that has ended; None without `training.patience`.

    Raises UserError as `finetuned_step`.
    """
    return _step_in(early_stopping_file(run_folder))


def _step_in(path: Path) -> int | None:
    # `evaluation/results.py` defines the whole file; only the step is needed here.
    if not path.exists():
        return None
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UserError(f"{path} is not JSON: {error}") from None
    if not isinstance(content, dict) or not isinstance(content.get("step"), int):
        raise UserError(f"{path} does not name the chosen step: `step` should be a whole number")
    return int(content["step"])


def checkpoint_to_open(run_folder: Path, step: int | None = None) -> Path:
    """Return the checkpoint of a step, by default the one that fine-tuning chose, or the latest.

    Raises UserError if this is not a run folder, or has no such checkpoint.
    """
    chosen = finetuned_step(run_folder) if step is None else None
    if chosen is not None and chosen not in (steps := saved_steps(run_folder)):
        existing = ", ".join(map(str, steps)) or "none"
        raise UserError(
            f"{run_folder} has no checkpoint of step {chosen}, which its fine-tuning chose; name"
            f" another step: {existing}"
        )
    return chosen_checkpoint(run_folder, chosen if step is None else step)


def checkpoints_by_age(run_folder: Path, *, up_to: int | None = None) -> list[Path]:
    """Return the checkpoints from which a run may resume, newest first.

    These are `latest` and older ones, or all of them if `latest` is missing or invalid; with
    `up_to`, only those up to that step.
    """
    steps = [step for step in saved_steps(run_folder) if up_to is None or step <= up_to]
    folders = [step_folder(run_folder, step) for step in reversed(steps)]
    named = _named(_pointer(run_folder))
    names = [folder.name for folder in folders]
    return folders[names.index(named) :] if named in names else folders


def set_aside(run_folder: Path, folders: Sequence[Path], *, newest: Path) -> None:
    """Rename damaged checkpoints and make `newest` the latest."""
    # Do this first: a kill in between must not leave `latest` naming a folder that is gone.
    write_atomically(_pointer(run_folder), f"{newest.name}\n".encode())
    for folder in folders:
        target = folder.with_name(folder.name + _ASIDE)
        shutil.rmtree(target, ignore_errors=True)
        os.rename(folder, target)


def remove_partial(run_folder: Path) -> None:
    """Delete checkpoints that a killed process was writing; no other process may be writing.

    Folders that cannot be deleted, for example since their files are open elsewhere on NFS, are
    left.
    """
    for folder in (run_folder, run_folder / "checkpoints"):
        for path in folder.glob(".*.partial*"):
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)


def publish(run_folder: Path, step: int, *, keeps_newer: bool = False) -> Path:
    """Rename a complete checkpoint to its final name, then update `latest`.

    With `keeps_newer`, `latest` is the newest checkpoint, which may be another one. A run names its
    own, since newer ones are then left from before it resumed.
    """
    target = step_folder(run_folder, step)
    if target.exists():
        # Left by a run that was killed before it updated `latest`, and then restarted.
        shutil.rmtree(target)
    os.rename(partial_folder(run_folder, step), target)
    # The new name must be on the disk before `latest` points to it.
    flush_folder(target.parent)
    newest = step_folder(run_folder, saved_steps(run_folder)[-1]) if keeps_newer else target
    write_atomically(_pointer(run_folder), f"{newest.name}\n".encode())
    return target


def prune(
    run_folder: Path,
    *,
    keep_last: int,
    keep_every: int,
    keep_at: Collection[int] = (),
    regular: int = 0,
) -> None:
    """Delete all but the newest `keep_last` checkpoints, every `keep_every`-th and `keep_at`.

    With `regular`, also keep the newest `keep_last` whose step is a multiple of it, since those
    saved on request may lie close together. Checkpoints newer than `latest`, which a killed process
    may have left, do not count: a run resumes from none of them. Checkpoints that were set aside
    are deleted once they are older than the newest ones kept.
    """
    latest = latest_checkpoint(run_folder)
    steps = saved_steps(run_folder)
    usable = [step for step in steps if latest is None or step_folder(run_folder, step) <= latest]
    for folder in (run_folder / "checkpoints").glob(f"step-*{_ASIDE}"):
        if folder.name < step_folder(run_folder, usable[-keep_last:][0]).name:
            shutil.rmtree(folder)
    kept = set(keep_at)
    for known in (steps, usable):
        spaced = [step for step in known if regular and step % regular == 0]
        kept.update(known[-keep_last:], spaced[-keep_last:])
    for step in steps:
        folder = step_folder(run_folder, step)
        if step in kept or (keep_every and step % keep_every == 0) or folder == latest:
            continue
        # Rename first, so that a half-deleted checkpoint is never visible.
        doomed = partial_folder(run_folder, step)
        shutil.rmtree(doomed, ignore_errors=True)
        os.rename(folder, doomed)
        shutil.rmtree(doomed)
