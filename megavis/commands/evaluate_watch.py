"""`megavis evaluate watch`: evaluate each checkpoint of a run as it appears."""

from __future__ import annotations

import argparse
import contextlib
import json
import select
import signal
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from torch.utils.tensorboard import SummaryWriter

from megavis.checkpoint.format.folder import (
    latest_checkpoint,
    saved_steps,
    step_folder,
)
from megavis.commands.checkpoint_measures import CheckpointMeasures, SampleFID
from megavis.commands.opening import job_closed, open_run
from megavis.commands.options.images import DISTANCE
from megavis.config.errors import UserError
from megavis.sampling.grids import save_png
from megavis.training.metrics import read_json_lines

RESULTS_NAME = "watch.jsonl"


_SETTINGS = ("train_images", "validation_images", "seed")
"""Options recorded with each result; numbers of images are maxima."""


def watch(args: argparse.Namespace) -> int:
    """Evaluate until the run is finished or a signal arrives.

    Raises:
        UserError: the run's images do not allow a measure.
    """
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        with job_closed():
            _watch(args)
    except KeyboardInterrupt:
        sys.stdout.write("stopped\n")
    finally:
        signal.signal(signal.SIGTERM, before)
    return 0


def _watch(args: argparse.Namespace) -> None:
    distance = SampleFID(args) if DISTANCE in args.what else None
    pruned: set[int] = set()
    is_last_look = False
    while True:
        for step in _waiting_steps(args, pruned):
            if (record := _measured(args, step, distance)) is None:
                pruned.add(step)
                sys.stdout.write(f"step {step} was pruned before it was read\n")
            else:
                _keep(args.run_folder, record)
        if is_last_look:
            return
        # A checkpoint may have appeared just before the end: look once more.
        is_last_look = _wait(args)


def _waiting_steps(args: argparse.Namespace, pruned: set[int]) -> Iterator[int]:
    """Yield the steps of checkpoints to evaluate, polling after each."""
    while True:
        done = {record["step"] for record in _records(args.run_folder)} | pruned
        newest, last = _newest_step(args.run_folder), _last_step(args.run_folder)
        waiting = [
            step
            for step in saved_steps(args.run_folder)
            if step <= newest and step not in done and (step % args.every == 0 or step == last)
        ]
        if not waiting:
            return
        yield waiting[0]


def _records(run_folder: Path) -> list[dict[str, Any]]:
    return read_json_lines(run_folder / "evaluation" / RESULTS_NAME)


def _newest_step(run_folder: Path) -> int:
    """Return the step named by `latest`; later checkpoints are not published yet."""
    with contextlib.suppress(UserError):  # Between publishing and pruning of the named checkpoint.
        if checkpoint := latest_checkpoint(run_folder):
            return int(checkpoint.name.partition("-")[2])
    return -1


def _last_step(run_folder: Path) -> int | None:
    """Return the last step of the run; None before it has started."""
    path = run_folder / "config.yaml"
    if not path.exists():
        return None
    return int(yaml.safe_load(path.read_text(encoding="utf-8"))["training"]["steps"])


def _is_finished(run_folder: Path) -> bool:
    # Written by a fine-tuning run when it ends, maybe before its last step.
    ended_early = (run_folder / "evaluation" / "finetune_test.json").exists()
    return ended_early or _newest_step(run_folder) == _last_step(run_folder)


def _wait(args: argparse.Namespace) -> bool:
    """Wait until the next poll; return whether the run has ended."""
    if args.until_input_ends:
        # Training knows its last step better than the config, which may be from an earlier start.
        return bool(select.select([sys.stdin], [], [], args.interval)[0])
    if _is_finished(args.run_folder):
        return True
    time.sleep(args.interval)
    return False


def _measured(
    args: argparse.Namespace, step: int, distance: SampleFID | None
) -> dict[str, Any] | None:
    """Evaluate a checkpoint; None if it was pruned meanwhile."""
    began = time.perf_counter()
    try:
        opened = open_run(args.run_folder, step=step, device=args.device, precision=args.precision)
        measures = CheckpointMeasures(opened, args, distance)
        numbers: dict[str, float | str] = {}
        for name in args.what:
            if name == "samples":
                _show(args.run_folder, step, measures.picture())
            else:
                numbers |= measures.numbers(name)
    except (UserError, OSError):
        if step_folder(args.run_folder, step).is_dir():
            raise
        return None
    return {
        "step": step,
        **numbers,
        "seconds": time.perf_counter() - began,
        **{name: getattr(args, name) for name in _SETTINGS},
    }


def _keep(run_folder: Path, record: Mapping[str, Any]) -> None:
    """Append a record, add it to TensorBoard and print it."""
    folder = run_folder / "evaluation"
    folder.mkdir(exist_ok=True)
    with (folder / RESULTS_NAME).open("a", encoding="utf-8") as file:
        file.write(json.dumps(record) + "\n")
    shown = {name: record[name] for name in record if name not in ("step", *_SETTINGS)}
    told = shown.pop("distance_of", None)
    with _board(run_folder) as board:
        for name, value in shown.items():
            board.add_scalar(f"evaluation/{name}", value, record["step"])
    words = ", ".join(f"{name} {value:.4g}" for name, value in shown.items())
    words += f" | {told}" if told else ""
    sys.stdout.write(f"step {record['step']}: {words}\n")
    sys.stdout.flush()


def _show(run_folder: Path, step: int, pixels: np.ndarray) -> None:
    save_png(run_folder / "samples" / f"watch-{step:08d}.png", pixels)
    with _board(run_folder) as board:
        board.add_image("evaluation/samples", pixels, step, dataformats="HWC")


def _board(run_folder: Path) -> Any:
    """Open the watch's TensorBoard folder, separate from that of training."""
    return SummaryWriter(str(run_folder / "tensorboard" / "evaluation"))
