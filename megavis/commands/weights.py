"""`megavis checkpoint`, `import`, `export`: the weights of runs, also in other forms."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from megavis.checkpoint.format import folder as folders
from megavis.checkpoint.format.folder import (
    finetuned_step,
    latest_checkpoint,
    saved_steps,
    step_folder,
)
from megavis.checkpoint.format.manifest import damages, read_manifest
from megavis.checkpoint.format.tensor_files import save_tensors
from megavis.checkpoint.format.tensor_reader import read_weights
from megavis.checkpoint.state import save as conversion
from megavis.commands.opening import job_closed, open_run
from megavis.config.errors import UserError, room_needed
from megavis.config.load import (
    dump_config,
    load_config,
    load_run_config,
)
from megavis.config.papers import ImportSpec, paper_imports
from megavis.data.format.files import to_json, write_atomically
from megavis.data.format.manifest import PALETTE_NAME
from megavis.training.callbacks.validation import EarlyStopping, accuracy_history
from megavis.training.metrics import read_metrics
from megavis.weights.exports import write_huggingface, write_timm
from megavis.weights.released import Released, import_own, read_json

_AXES = {"tp": "tensor_model", "cp": "context", "pp": "pipeline_model", "dp": "data"}


def list_(args: argparse.Namespace) -> int:
    """Print a line per checkpoint; return 2 if one is incomplete."""
    rows = list(_rows(args.run_folder))
    if args.json:
        sys.stdout.write(to_json(rows, indent=2) + "\n")
    else:
        for row in rows:
            state = row["problem"] or "complete"
            mark = " (latest)" if row["is_latest"] else ""
            sys.stdout.write(
                f"{row['step']:>10}  {row['bytes'] / 1e9:8.3f} GB  {row['layout']:12}"
                f"  {state}{mark}\n"
            )
    return 2 if any(row["problem"] for row in rows) else 0


def _steps(run_folder: Path) -> list[int]:
    steps = saved_steps(run_folder)
    if not steps:
        raise UserError(f"{run_folder}: has no checkpoints")
    return steps


def _rows(run_folder: Path) -> Iterator[dict[str, Any]]:
    latest = latest_checkpoint(run_folder)
    for step in _steps(run_folder):
        folder = step_folder(run_folder, step)
        with contextlib.suppress(FileNotFoundError):
            row = {"step": step, **_contents(folder), "is_latest": folder == latest}
            # Training deletes old checkpoints.
            if folder.exists():
                yield row


def _contents(folder: Path) -> dict[str, Any]:
    """Return size, layout and problem of a checkpoint. Raises OSError."""
    sizes_of_files = [file.stat().st_size for file in folder.iterdir() if file.is_file()]
    row: dict[str, Any] = {"bytes": sum(sizes_of_files), "layout": "", "problem": ""}
    try:
        manifest = read_manifest(folder)
    except UserError as error:
        return {**row, "problem": str(error)}
    sizes = {
        short: manifest.layout.get(f"{name}_parallel_size", 1) for short, name in _AXES.items()
    }
    row["layout"] = "-".join(
        f"{short}{size}" for short, size in sizes.items() if size > 1 or short != "cp"
    )
    for name, stored in manifest.files.items():
        path = folder / name
        if not path.is_file() or path.stat().st_size != stored.size:
            row["problem"] = f"{name} is missing or cut off"
    return row


def verify(args: argparse.Namespace) -> int:
    """Print the damage of each checkpoint; return 2 if there is any."""
    steps = _steps(args.run_folder)
    if args.step is not None:
        steps = [chosen_step(args.run_folder, args.step)]
    damaged = 0
    for step in steps:
        folder = step_folder(args.run_folder, step)
        found = list(damages(folder))
        if found and not folder.exists():
            # Training deletes old checkpoints.
            sys.stdout.write(f"step {step}: deleted meanwhile\n")
            continue
        damaged += bool(found)
        sys.stdout.write(f"step {step}: {'DAMAGED' if found else 'every byte is as saved'}\n")
        sys.stdout.writelines(f"  {text}\n" for text in found)
    return 2 if damaged else 0


def chosen_step(run_folder: Path, step: int | None) -> int:
    """Return `step`, or the newest one for None; the run must have it."""
    steps = _steps(run_folder)
    if step is None:
        return steps[-1]
    if step not in steps:
        known = ", ".join(map(str, steps))
        raise UserError(f"--step: {run_folder} has no checkpoint of step {step}; it has {known}")
    return step


def prune(args: argparse.Namespace) -> int:
    """Delete checkpoints, and print the steps of the others."""
    before = _steps(args.run_folder)
    folders.prune(
        args.run_folder,
        keep_last=args.keep_last,
        keep_every=args.keep_every,
        keep_at=set(_protected_steps(args.run_folder)),
    )
    after = _steps(args.run_folder)
    kept = ", ".join(map(str, after))
    sys.stdout.write(f"deleted {len(before) - len(after)} of {len(before)}; kept {kept}\n")
    return 0


def _protected_steps(run_folder: Path) -> Iterator[int]:
    """Yield the steps that training does not delete either, such as the best of early stopping."""
    path = run_folder / "config.yaml"
    if not path.exists():
        return
    config = load_config(path).config
    yield from config.checkpoint.keep_at
    patience = config.training.patience
    if config.finetune is not None or patience:
        history = accuracy_history(read_metrics(run_folder))
        best = EarlyStopping(patience, history).best_of(saved_steps(run_folder))
        yield from (step for step in (best, finetuned_step(run_folder)) if step is not None)


def convert(args: argparse.Namespace) -> int:
    """Write the checkpoint into another run folder, with the run's config under its name."""
    step = chosen_step(args.run_folder, args.step)
    source = step_folder(args.run_folder, step)
    contents, is_new = _run_files(args.run_folder, args.target), not args.target.exists()
    try:
        with room_needed(args.target):
            written = conversion.convert(
                source, args.target, tensor_size=args.tensor, data_size=args.data
            )
            for name, content in contents.items():
                if not (args.target / name).exists():
                    write_atomically(args.target / name, content)
    except BaseException:
        own = folders.partial_folder(args.target, step)
        shutil.rmtree(own, ignore_errors=True)
        # Another process may have converted another step into the folder meanwhile.
        others = set(own.parent.glob("*step-*")) - {step_folder(args.target, step)}
        if is_new and not others:
            shutil.rmtree(args.target, ignore_errors=True)
        raise
    sys.stdout.write(f"{written}\n")
    return 0


def _run_files(run_folder: Path, target: Path) -> dict[str, bytes]:
    """Return the config and the palette, if there are any, for a run in another folder."""
    contents = {}
    if (run_folder / "config.yaml").exists():
        place = {"name": target.name, "output": str(target.parent)}
        config = load_run_config(run_folder).model_copy(update=place)
        contents["config.yaml"] = dump_config(config).encode()
    if (run_folder / PALETTE_NAME).exists():
        contents[PALETTE_NAME] = (run_folder / PALETTE_NAME).read_bytes()
    return contents


def import_run(args: argparse.Namespace) -> int:
    """Write a run."""
    with room_needed(args.run_folder):
        if args.form == "huggingface" and _model_type(args.source) == "megavis":
            import_own(args.source, args.run_folder)
            sys.stdout.write(f"{args.run_folder}: the weights of {args.source}\n")
        else:
            _import(args, _form(args))
    return 0


def _form(args: argparse.Namespace) -> ImportSpec:
    """Return the named form, or for a folder of the Hub what its `config.json` names."""
    specs = {spec.name: spec for spec in paper_imports()}
    if args.form != "huggingface":
        return specs[args.form]
    kind = _model_type(args.source)
    by_type = {name: spec for spec in specs.values() for name in spec.model_types}
    if kind not in by_type:
        raise UserError(
            f"{args.source / 'config.json'}: model_type is {kind!r}; use one of"
            f" {', '.join([*by_type, 'megavis'])}"
        )
    return by_type[kind]


def _model_type(folder: Path) -> str:
    """Return `model_type`, which timm's files do not have."""
    settings = read_json(folder / "config.json")
    return "timm" if "architecture" in settings else str(settings.get("model_type"))


def _import(args: argparse.Namespace, form: ImportSpec) -> None:
    module, _, function = form.read.partition(":")
    read = getattr(importlib.import_module(module), function)
    try:
        with job_closed():
            released: Released = read(args)
            total = released.write(args.run_folder)
    except UserError:
        raise
    except ValueError as error:
        # Sizes are read from the weights, and a network may refuse them.
        reason = " ".join(str(error).split())
        raise UserError(f"{args.source}: no such network can be built: {reason}") from None
    sys.stdout.write(f"{args.run_folder}: {total:,} parameters from {args.source}\n")
    if released.note:
        sys.stdout.write(f"  {released.note}\n")


def export(args: argparse.Namespace) -> int:
    """Export; the output appears only when it is complete and agrees with the run."""
    with job_closed(), room_needed(args.out):
        opened = open_run(args.run_folder, step=args.step, device="cpu")
        if args.to == "safetensors":
            weights = read_weights(step_folder(opened.folder, opened.step))
            with renamed_when_complete(args.out) as partial:
                save_tensors(partial, {name: each.contiguous() for name, each in weights.items()})
            sys.stdout.write(f"{args.out}: {len(weights)} tensors\n")
            return 0
        write = {"huggingface": write_huggingface, "timm": write_timm}[args.to]
        with renamed_when_complete(args.out) as partial:
            exported = write(opened, partial)
    sys.stdout.write(f"{args.out}: opens with {exported.form}\n")
    if exported.note:
        sys.stdout.write(f"  {exported.note}\n")
    if exported.difference is not None:
        sys.stdout.write(
            f"  the loader of its card differs from the run by {exported.difference:.1e} on random"
            " input\n"
        )
    return 0


@contextlib.contextmanager
def renamed_when_complete(target: Path) -> Iterator[Path]:
    """Yield a temporary path for a file or folder, which is renamed to `target` after the block.

    It is removed after an error, and by the next call if the process was killed.

    Raises:
        UserError: another process has written `target` meanwhile.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_name(f".{target.name}.partial")
    _remove(partial)
    try:
        yield partial
        if target.exists():
            raise UserError(f"{target} exists; choose another name")
        os.rename(partial, target)
    except BaseException:
        _remove(partial)
        raise


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
