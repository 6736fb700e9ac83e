"""`megavis report` and `megavis runs`: results of runs, as a summary and a web page, or as a table.

Both read run folders without torch.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from megavis.checkpoint.format.folder import early_stopping_file, finetuning_file, saved_steps
from megavis.config.errors import UserError
from megavis.config.yaml_tree import ConfigSource, read_tree
from megavis.data.format.files import to_json, write_atomically
from megavis.data.format.folder_lock import holder_of
from megavis.reports.page import render
from megavis.reports.run_record import RunRecord, metrics_of, setting
from megavis.training.metrics import read_metrics

_LABEL_WIDTH = 18


def run(args: argparse.Namespace) -> int:
    """Print the summary and write the page."""
    records = [RunRecord.read(folder) for folder in args.run_folders]
    for record in records:
        sys.stdout.write("\n".join(summary(record)) + "\n")
    path = args.html or args.run_folders[0] / "report.html"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, render(records).encode())
    except OSError as error:
        way = "" if args.html else "; name another place with --html"
        raise UserError(f"{path} cannot be written: {error.strerror}{way}") from None
    sys.stdout.write(_row("page", str(path)) + "\n")
    return 0


def summary(run: RunRecord) -> list[str]:
    """Return the lines of one run for a terminal."""
    folder = run.folder
    lines = [f"{folder}, step {run.last_step}"]
    lines += [*_losses(run), *_measures(run)]
    lines += _pictures(run.pictures())
    lines.append(_row("TensorBoard", f"tensorboard --logdir {folder / 'tensorboard'}"))
    return lines


def _losses(run: RunRecord) -> Iterator[str]:
    """Yield the first and the last loss, on held-out images if the run measured it."""
    dimensions = run.dimensions_per_loss
    for key, name in (("validation_loss", "validation loss"), ("loss", "training loss")):
        values = run.series(key)[1]
        if values:
            unit = "" if dimensions is None else ", nats per token"
            yield _row(name, f"{values[0]:.4f} before, {values[-1]:.4f} after{unit}")
            if dimensions is not None:
                # As `megavis likelihood` defines them.
                first, last = (values[at] / dimensions / math.log(2) for at in (0, -1))
                yield _row("", f"{first:.4f} before, {last:.4f} after, bits per dimension")
            return


def _measures(run: RunRecord) -> Iterator[str]:
    """Yield a row per evaluation result, named once, and per file that cannot be read."""
    found, refused = run.results
    before = ""
    for measure in metrics_of(found):
        note = f"  {measure.note}" if measure.note else ""
        label = "" if measure.group == before else measure.group
        yield _row(label, f"{measure.name:16}{measure.formatted:>8}{note}")
        before = measure.group
    for reason in refused.values():
        yield _row("cannot be read", reason)


def _pictures(pictures: Mapping[str, Path]) -> Iterator[str]:
    """Yield the newest image of each kind: `samples-*.png`, `completions-*.png`, `step-*.png`."""
    # Images by `megavis sample` are newer and larger than those written during training.
    names = [kind for kind in pictures if kind != "step"] or list(pictures)
    for kind in names:
        yield _row("while training" if kind == "step" else kind, str(pictures[kind]))


def _row(label: str, text: str) -> str:
    return f"  {label:{_LABEL_WIDTH}}{text}"


_COLUMNS = ("run", "paper", "step", "loss", "validation", "state", "changed")


def list_runs(args: argparse.Namespace) -> int:
    """Write a line for each run."""
    if not args.folder.is_dir():
        raise UserError(f"{args.folder}: no such folder")
    found = sorted(_runs_in(args.folder))
    rows = sorted(
        (_run_row(folder, args.folder) for folder in found), key=lambda row: row["changed"]
    )
    if not rows:
        raise UserError(f"{args.folder} holds no run: it has no config.yaml")
    if args.json:
        sys.stdout.write(to_json(rows, indent=2) + "\n")
    else:
        sys.stdout.write(table([_COLUMNS, *(_written(row) for row in rows)]))
    return 0


def _runs_in(above: Path) -> Iterator[Path]:
    """Yield the run folders below a folder; say which of its folders cannot be listed.

    Raises UserError if that is the folder itself.
    """

    def complain(error: OSError) -> None:
        text = f"{error.filename} cannot be listed: {error.strerror}"
        if error.filename == str(above):
            raise UserError(text)
        sys.stderr.write(f"WARNING: {text}\n")

    for folder, _, names in os.walk(above, onerror=complain):
        if "config.yaml" in names and Path(folder, "config.yaml").is_file():
            yield Path(folder)


def _run_row(folder: Path, above: Path) -> dict[str, Any]:
    """Return the row of a run; None for unknown values."""
    # It may be a file of another tool.
    config = _read_config(folder / "config.yaml")
    planned, metrics = setting(config, "training.steps"), read_metrics(folder)
    steps = [record["step"] for record in metrics if "step" in record] or saved_steps(folder)
    files = [folder / "config.yaml", folder / "metrics.jsonl"]
    changed = max(path.stat().st_mtime for path in files if path.exists())
    row = {
        "run": str(folder.relative_to(above)),
        "paper": str(setting(config, "objective.name", "")),
        "finetunes": bool(config.get("finetune")),
        "step": max(steps, default=0),
        "steps": planned if isinstance(planned, int) else None,
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
    # With `training.patience` a run may end before its last step.
    has_chosen = early_stopping_file(folder).exists() or finetuning_file(folder).exists()
    return "finished" if has_chosen or row["step"] >= (row["steps"] or 0) else "stopped"


def _read_config(path: Path) -> dict[str, Any]:
    try:
        return read_tree(path, ConfigSource(str(path)))
    except UserError:
        return {}


def _last(metrics: list[dict[str, Any]], key: str) -> float | None:
    values = (record.get(key) for record in reversed(metrics))
    return next((value for value in values if isinstance(value, int | float)), None)


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
