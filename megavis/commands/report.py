"""`megavis report`: what a run has come to, on one screen."""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from megavis.config.errors import UserError

_LABEL_WIDTH = 18


def add_parser(subparsers: Any) -> None:
    """Add the command to the parser."""
    parser = subparsers.add_parser(
        "report",
        help="what a run has come to, on one screen",
        description="Sum up a run from its folder: validation loss before and after, linear probe,"
        " pictures, and how to watch it in TensorBoard.",
        epilog="example: megavis report runs/igpt_demo",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("run_folder", metavar="RUN", type=Path, help="run folder")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Write the summary.

    Raises:
        UserError: the folder holds no metrics.
    """
    folder: Path = args.run_folder
    path = folder / "metrics.jsonl"
    if not path.exists():
        raise UserError(f"{folder} is not a run folder: it holds no metrics.jsonl")
    records = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    if not records:
        raise UserError(f"{path} is empty: the run has not begun")
    lines = [f"{folder}, step {records[-1]['step']}"]
    lines += [*_losses(records), *_probe(folder), *_pictures(folder)]
    lines.append(_row("TensorBoard", f"tensorboard --logdir {folder / 'tensorboard'}"))
    sys.stdout.write("\n".join(lines) + "\n")
    return 0


def bits_per_dimension(nats_per_token: float, *, dimensions_per_token: int = 3) -> float:
    """Return bits a dimension of an image: nats / ln 2 / dimensions.

    A palette token stands for the three dimensions of a pixel, red, green and blue.
    """
    return nats_per_token / math.log(2) / dimensions_per_token


def _losses(records: list[dict[str, float]]) -> Iterator[str]:
    """The first and the last loss, on held-out images where the run has measured these."""
    for key, name in (("validation_loss", "validation loss"), ("loss", "training loss")):
        values = [record[key] for record in records if key in record]
        if values:
            first, last = values[0], values[-1]
            yield _row(name, f"{first:.4f} before, {last:.4f} after, nats a token")
            bits = [bits_per_dimension(value) for value in (first, last)]
            yield _row("", f"{bits[0]:.4f} before, {bits[1]:.4f} after, bits a dimension")
            return


def _probe(folder: Path) -> Iterator[str]:
    path = folder / "evaluation" / "probe.json"
    if not path.exists():
        return
    result = json.loads(path.read_text(encoding="utf-8"))
    best, pixels = (result[name]["accuracy"] for name in ("best_layer", "pixels"))
    yield _row(
        "linear probe",
        f"{best:.1%} (layer {result['best_layer']['layer']}), raw pixels {pixels:.1%},"
        f" untrained network {result['untrained_accuracy']:.1%}",
    )


def _pictures(folder: Path) -> Iterator[str]:
    """The newest picture of each kind: `samples-*.png`, `completions-*.png`, `step-*.png`."""
    newest: dict[str, Path] = {}
    for path in sorted(folder.glob("samples/*.png")):
        newest[path.stem.partition("-")[0]] = path
    if len(newest) > 1:
        # What `megavis sample` drew is newer and larger than what training drew on its way.
        newest.pop("step", None)
    for kind, path in newest.items():
        yield _row("while training" if kind == "step" else kind, str(path))


def _row(label: str, text: str) -> str:
    return f"  {label:{_LABEL_WIDTH}}{text}"
