"""`megavis probe`: the linear probe of a run, beside raw pixels and an untrained network."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megavis.config.errors import UserError

if TYPE_CHECKING:
    from megavis.evaluation.probe import ProbeData, ProbeResult
    from megavis.model.runner import Runner
    from megavis.notebook import Run


def add_parser(subparsers: Any) -> None:
    """Add the command to the parser."""
    parser = subparsers.add_parser(
        "probe",
        help="accuracy of a linear classifier on the features of each layer",
        description="Fit a linear classifier on the features of each layer (iGPT, section 2.4), on"
        " raw pixels, and on untrained networks (their mean), all by one procedure: layer and"
        " regularisation are chosen on a held-out part of the training images, the accuracies are"
        " those of the validation images.",
        epilog="example: megavis probe runs/igpt-demo --layers 2,3,4 --train-images 2000",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("run_folder", metavar="RUN", type=Path, help="run folder")
    parser.add_argument("--layers", default="all", help="all, or numbers such as 0,3,6")
    parser.add_argument("--train", help="shard folder; default: the run's data.train")
    parser.add_argument("--validation", help="shard folder; default: the run's data.validation")
    parser.add_argument("--train-images", type=int, default=5000, help="at most; default: 5000")
    parser.add_argument("--validation-images", type=int, help="at most; default: all")
    parser.add_argument(
        "--untrained-networks", type=int, default=3, help="to compare with; default: 3"
    )
    parser.add_argument(
        "--seed", type=int, default=0, help="of held-out part and untrained weights; default: 0"
    )
    parser.add_argument("--step", type=int, help="checkpoint; default: the newest")
    parser.add_argument("--out", type=Path, help="default: RUN/evaluation/probe.json")
    parser.add_argument("--device", choices=("cpu", "cuda"), help="default: CUDA where there is")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Probe, write the result as JSON and as a table.

    Raises:
        UserError: the run or its data cannot be opened, or the data has no labels.
    """
    from megavis.commands.quiet import quietly

    if args.train_images < 1 or (args.validation_images or 1) < 1:
        raise UserError("--train-images and --validation-images must be at least 1")
    if args.untrained_networks < 1 or args.seed < 0:
        raise UserError("--untrained-networks must be at least 1, and --seed at least 0")
    with quietly():
        from megavis.evaluation.probe import probe
        from megavis.notebook import Run
        from megavis.parallel.context import close_context
        from megavis.parallel.launch import read_launch

        if read_launch(os.environ).world_size > 1:
            raise UserError("megavis probe runs as one process; start it without a launcher")
        opened = Run.open(args.run_folder, step=args.step, device=args.device)
    try:
        result = probe(
            opened.runner,
            _untrained(opened, args),
            opened.objective,
            _data(opened, args),
            step=opened.step,
            layers=read_layers(args.layers, opened.config.model.num_layers),
            seed=args.seed,
        )
    finally:
        close_context()
    out = args.out or opened.folder / "evaluation" / "probe.json"
    result.write(out)
    sys.stdout.write(table(result) + f"{out}\n")
    return 0


def read_layers(text: str, num_layers: int) -> Sequence[int] | None:
    """Read `all` (None), or numbers in 0 .. `num_layers` with commas between them.

    Raises:
        UserError: the text is neither.
    """
    if text == "all":
        return None
    try:
        layers = [int(part) for part in text.split(",")]
    except ValueError:
        layers = [-1]
    if any(not 0 <= layer <= num_layers for layer in layers):
        raise UserError(f"--layers {text}: say all, or numbers from 0 to {num_layers}, as 0,3")
    return layers


def table(result: ProbeResult) -> str:
    """Return the accuracies as lines of text, the best layer marked."""
    networks = len(result.untrained)
    lines = [
        f"linear probe at step {result.step}: {result.num_classes} classes,"
        f" {result.num_fitted} + {result.num_held_out} training images,"
        f" {result.num_validation} validation images, seed {result.seed},"
        f" {networks} untrained networks",
        f"{'layer':>9}{'trained':>10}{'untrained':>11}",
    ]
    for trained, *untrained in zip(result.trained, *result.untrained, strict=True):
        mark = "  <- best by held-out training images" if trained == result.best else ""
        mean = sum(score.accuracy for score in untrained) / networks
        lines.append(f"{trained.layer:>9}{trained.accuracy:>10.1%}{mean:>11.1%}{mark}")
    lines += [
        f"best layer {result.best.accuracy:.1%}, raw pixels {result.pixels.accuracy:.1%},"
        f" untrained network {result.untrained_accuracy:.1%}",
    ]
    return "\n".join(lines) + "\n"


def _untrained(opened: Run, args: argparse.Namespace) -> Iterator[Runner]:
    """Build one network with fresh weights after another."""
    from megavis.commands.quiet import quietly

    for number in range(args.untrained_networks):
        with quietly():
            network = opened.untrained(args.seed + number)
        yield network.runner


def _data(opened: Run, args: argparse.Namespace) -> ProbeData:
    from megavis.data.dataset import ShardDataset
    from megavis.evaluation.probe import ProbeData

    validation = args.validation or opened.config.data.validation
    if validation is None:
        raise UserError("the run has no data.validation; name a shard folder with --validation")
    train_data = ShardDataset(args.train or opened.config.data.train)
    validation_data = ShardDataset(validation)
    for dataset in (train_data, validation_data):
        for complaint in opened.objective.check_data(dataset.manifest):
            raise UserError(f"{dataset.directory} {complaint}")
        if dataset.manifest.tokenizer.sha256 != opened.palette.sha256:
            raise UserError(f"{dataset.directory} was made with another palette than the run")
    return ProbeData(
        train_data, validation_data, opened.palette, args.train_images, args.validation_images
    )
