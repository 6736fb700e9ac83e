"""`megavis report`: results of runs, as a terminal summary and a web page."""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

from megavis.config.errors import UserError
from megavis.data.format.files import write_atomically
from megavis.reports.page import render
from megavis.reports.results import eval_metrics
from megavis.reports.run_record import RunRecord

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
        raise UserError(f"--html {path}: {error.strerror}") from None
    sys.stdout.write(_row("page", str(path)) + "\n")
    return 0


def summary(run: RunRecord) -> list[str]:
    """Return the lines of one run for a terminal."""
    folder = run.folder
    lines = [f"{folder}, step {run.last_step}"]
    lines += [*_losses(run), *_measures(folder)]
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


def _measures(folder: Path) -> Iterator[str]:
    """Yield a row per evaluation result; the measurement is named once."""
    before = ""
    for measure in eval_metrics(folder):
        note = f"  {measure.note}" if measure.note else ""
        label = "" if measure.group == before else measure.group
        yield _row(label, f"{measure.name:16}{measure.formatted:>8}{note}")
        before = measure.group


def _pictures(pictures: Mapping[str, Path]) -> Iterator[str]:
    """Yield the newest image of each kind: `samples-*.png`, `completions-*.png`, `step-*.png`."""
    # Images by `megavis sample` are newer and larger than those written during training.
    names = [kind for kind in pictures if kind != "step"] or list(pictures)
    for kind in names:
        yield _row("while training" if kind == "step" else kind, str(pictures[kind]))


def _row(label: str, text: str) -> str:
    return f"  {label:{_LABEL_WIDTH}}{text}"
