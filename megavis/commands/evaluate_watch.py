"""`megavis evaluate watch`: measures each checkpoint of a run as it appears."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import select
import signal
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megavis.checkpoint.format.folder import require_run_folder
from megavis.commands.arguments import add_run
from megavis.commands.checkpoint_measures import MEASURES, CheckpointMeasures
from megavis.commands.opening import job_closed, open_run
from megavis.commands.options import refuse_options
from megavis.commands.probing import add_data_arguments
from megavis.commands.quiet import quietly
from megavis.commands.sample_fid import MEASURE as DISTANCE
from megavis.commands.sample_fid import SampleFID, add_distance_arguments
from megavis.config.arguments import positive
from megavis.config.errors import UserError

if TYPE_CHECKING:
    import numpy as np

RESULTS_NAME = "watch.jsonl"
_SETTINGS = ("train_images", "validation_images", "seed")
"""Options that a line of results keeps; the numbers of images are at most."""


def add_watch(verbs: Any) -> None:
    """Add it to the verbs of `megavis evaluate`."""
    parser = verbs.add_parser(
        "watch",
        help="measure each checkpoint of a run as it appears",
        description="Beside a running job: measure each checkpoint when it has appeared, those that"
        " are there first. Numbers go to RUN/evaluation/watch.jsonl, a line a checkpoint, and to"
        " TensorBoard under 'evaluation'; samples to RUN/samples. Ends when the run has come to its"
        " last step, or on Ctrl-C and SIGTERM; started again it goes on with what is new. The"
        " config section `evaluation` lets a training start it by itself.",
        epilog="example: megavis evaluate watch runs/igpt_demo --what loss,probe,samples",
    )
    add_run(parser)
    parser.add_argument(
        "--what",
        type=read_measures,
        default=("loss", "probe"),
        metavar="NAMES",
        help=f"of {', '.join(MEASURES)}, with commas between them",
    )
    parser.add_argument(
        "--every", type=positive, default=1, help="only steps that N divides, and the last one"
    )
    parser.add_argument("--interval", type=float, default=5.0, help="seconds between two looks")
    # How a training ends what it has started, also when it is killed: the pipe closes.
    parser.add_argument("--until-input-ends", action="store_true", help=argparse.SUPPRESS)
    add_data_arguments(parser)
    add_distance_arguments(parser)
    parser.set_defaults(run=watch)


def read_measures(text: str) -> tuple[str, ...]:
    """Read names with commas between them.

    Raises:
        argparse.ArgumentTypeError: one is none of them.
    """
    names = tuple(name.strip() for name in text.split(","))
    for name in names:
        if name not in MEASURES:
            raise argparse.ArgumentTypeError(f"'{name}' is not one of {', '.join(MEASURES)}")
    return names


def watch(args: argparse.Namespace) -> int:
    """Measure until the run is finished or a signal comes.

    Raises:
        UserError: the folder holds no run, or its images do not allow a measure.
    """
    if args.interval <= 0:
        raise UserError(f"--interval {args.interval:g}: must be more than 0 seconds")
    if DISTANCE not in args.what and not args.until_input_ends:
        options = ("--reference", "--num-samples", "--inception", "--network")
        refuse_options(args, options, f"to --what without {DISTANCE}")
    if args.until_input_ends:
        os.nice(10)  # Training comes first, and may not have written its config yet.
    else:
        require_run_folder(args.run_folder)
    with quietly():
        import megavis.notebook  # noqa: F401 - its libraries chatter when they are first imported
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
        # What appeared before the end may not have been seen yet: look once more.
        is_last_look = _wait(args)


def _waiting_steps(args: argparse.Namespace, pruned: set[int]) -> Iterator[int]:
    """Yield the steps of checkpoints to measure, looking anew after each."""
    from megavis.checkpoint.format.folder import saved_steps

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
    from megavis.training.metrics import read_json_lines

    return read_json_lines(run_folder / "evaluation" / RESULTS_NAME)


def _newest_step(run_folder: Path) -> int:
    """Return the step that `latest` names; checkpoints after it are not published yet."""
    from megavis.checkpoint.format.folder import latest_checkpoint

    with contextlib.suppress(UserError):  # Between a publish and the pruning of what it named.
        if checkpoint := latest_checkpoint(run_folder):
            return int(checkpoint.name.partition("-")[2])
    return -1


def _last_step(run_folder: Path) -> int | None:
    """Return the step at which the run ends; None before it has begun."""
    import yaml

    path = run_folder / "config.yaml"
    if not path.exists():
        return None
    return int(yaml.safe_load(path.read_text(encoding="utf-8"))["training"]["steps"])


def _is_finished(run_folder: Path) -> bool:
    # What a fine-tuning run writes when it has ended, maybe before its last step.
    ended_early = (run_folder / "evaluation" / "finetune_test.json").exists()
    return ended_early or _newest_step(run_folder) == _last_step(run_folder)


def _wait(args: argparse.Namespace) -> bool:
    """Wait until the next look; say whether nothing more is to come."""
    if args.until_input_ends:
        # Training knows better than its config, which may be that of an earlier start.
        return bool(select.select([sys.stdin], [], [], args.interval)[0])
    if _is_finished(args.run_folder):
        return True
    time.sleep(args.interval)
    return False


def _measured(
    args: argparse.Namespace, step: int, distance: SampleFID | None
) -> dict[str, Any] | None:
    """Measure a checkpoint; None where it was pruned meanwhile."""
    from megavis.checkpoint.format.folder import step_folder

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
    """Append a line, show its numbers in TensorBoard and print them."""
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
    from megavis.sampling.grids import save_png

    save_png(run_folder / "samples" / f"watch-{step:08d}.png", pixels)
    with _board(run_folder) as board:
        board.add_image("evaluation/samples", pixels, step, dataformats="HWC")


def _board(run_folder: Path) -> Any:
    """Open TensorBoard's files of the watch: a folder of their own, since training writes too."""
    from torch.utils.tensorboard import SummaryWriter

    return SummaryWriter(str(run_folder / "tensorboard" / "evaluation"))
