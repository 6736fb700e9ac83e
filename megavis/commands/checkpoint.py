"""`megavis checkpoint`: list, verify, prune and convert the checkpoints of a run."""

from __future__ import annotations

import argparse
import json
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
from megavis.checkpoint.state import convert as conversion
from megavis.config.errors import UserError
from megavis.config.load import dump_config, load_config, load_run_config
from megavis.data.format.files import write_atomically
from megavis.data.format.manifest import PALETTE_NAME
from megavis.training.callbacks.validation import EarlyStopping, accuracy_history
from megavis.training.metrics import read_metrics

_AXES = {"tp": "tensor_model", "cp": "context", "pp": "pipeline_model", "dp": "data"}


def list_(args: argparse.Namespace) -> int:
    """Print a line per checkpoint; return 2 if one is incomplete."""
    rows = list(_rows(args.run_folder))
    if args.json:
        sys.stdout.write(json.dumps(rows, indent=2) + "\n")
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
        row = {"step": step, "bytes": 0, "layout": "", "problem": "", "is_latest": folder == latest}
        row["bytes"] = sum(file.stat().st_size for file in folder.iterdir())
        try:
            manifest = read_manifest(folder)
        except UserError as error:
            yield {**row, "problem": str(error)}
            continue
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
        yield row


def verify(args: argparse.Namespace) -> int:
    """Print the damage of each checkpoint; return 2 if there is any."""
    steps = _steps(args.run_folder)
    if args.step is not None:
        steps = [chosen_step(args.run_folder, args.step)]
    damaged = 0
    for step in steps:
        found = list(damages(step_folder(args.run_folder, step)))
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
    """Yield the steps that training does not delete either: fine-tuning needs its best one."""
    path = run_folder / "config.yaml"
    if not path.exists():
        return
    config = load_config(path).config
    yield from config.checkpoint.keep_at
    if config.finetune is not None:
        history = accuracy_history(read_metrics(run_folder))
        best = EarlyStopping(config.finetune.patience, history).best_of(saved_steps(run_folder))
        yield from (step for step in (best, finetuned_step(run_folder)) if step is not None)


def convert(args: argparse.Namespace) -> int:
    """Write the checkpoint into another run folder, with the run's config under its name."""
    source = step_folder(args.run_folder, chosen_step(args.run_folder, args.step))
    contents = _run_files(args.run_folder, args.target)
    written = conversion.convert(source, args.target, tensor_size=args.tensor, data_size=args.data)
    for name, content in contents.items():
        if not (args.target / name).exists():
            write_atomically(args.target / name, content)
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
