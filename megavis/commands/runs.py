"""`megavis runs`: a table of the runs in a folder, read without torch."""

from __future__ import annotations

import argparse
import json
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import yaml

from megavis.checkpoint.format.folder import saved_steps
from megavis.config.errors import UserError
from megavis.training.faults.run_lock import holder_of
from megavis.training.metrics import read_metrics

_COLUMNS = ("run", "paper", "step", "loss", "validation", "state", "changed")


def list_runs(args: argparse.Namespace) -> int:
    """Write a line for each run."""
    if not args.folder.is_dir():
        raise UserError(f"{args.folder}: no such folder")
    found = sorted(path.parent for path in args.folder.rglob("config.yaml"))
    rows = sorted((_run_row(folder, args.folder) for folder in found), key=lambda row: row["changed"])
    if not rows:
        raise UserError(f"{args.folder} holds no run: no config.yaml lies in it")
    if args.json:
        sys.stdout.write(json.dumps(rows, indent=2) + "\n")
    else:
        sys.stdout.write(table([_COLUMNS, *(_written(row) for row in rows)]))
    return 0


def _run_row(folder: Path, above: Path) -> dict[str, Any]:
    """Return the row of a run; None for unknown values."""
    config = _read_config(folder / "config.yaml")
    metrics = read_metrics(folder)
    steps = [record["step"] for record in metrics if "step" in record] or saved_steps(folder)
    files = [folder / "config.yaml", folder / "metrics.jsonl"]
    changed = max(path.stat().st_mtime for path in files if path.exists())
    row = {
        "run": str(folder.relative_to(above)),
        "paper": (config.get("objective") or {}).get("name", ""),
        "finetunes": bool(config.get("finetune")),
        "step": max(steps, default=0),
        "steps": (config.get("training") or {}).get("steps"),
        "loss": _last(metrics, "loss"),
        "validation": _last(metrics, "validation_loss"),
        "changed": datetime.fromtimestamp(changed, UTC).isoformat(timespec="seconds"),
    }
    return {**row, "state": _state(folder, row, has_trained=bool(metrics))}


def _state(folder: Path, row: dict[str, Any], *, has_trained: bool) -> str:
    if holder_of(folder) is not None:
        return "training"
    if not has_trained:
        return "imported" if saved_steps(folder) else "empty"
    return "finished" if row["step"] >= (row["steps"] or 0) else "stopped"


def _read_config(path: Path) -> dict[str, Any]:
    try:
        tree = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError):
        return {}
    return tree if isinstance(tree, dict) else {}


def _last(metrics: list[dict[str, Any]], key: str) -> float | None:
    return next((record[key] for record in reversed(metrics) if key in record), None)


def _written(row: dict[str, Any]) -> tuple[str, ...]:
    numbers = (row["loss"], row["validation"])
    loss, validation = ("" if number is None else f"{number:.4g}" for number in numbers)
    paper = f"{row['paper']}, fine-tuning" if row["finetunes"] else row["paper"]
    step = f"{row['step']}/{row['steps']}" if row["steps"] else str(row["step"])
    changed = row["changed"].replace("T", " ")[:16]
    return row["run"], paper, step, loss, validation, row["state"], changed


def table(rows: list[tuple[str, ...]]) -> str:
    """Return rows as text in aligned columns."""
    widths = [max(len(cell) for cell in column) for column in zip(*rows, strict=True)]
    lines = (
        "  ".join(f"{cell:{width}}" for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    )
    return "".join(f"{line}\n" for line in lines)
