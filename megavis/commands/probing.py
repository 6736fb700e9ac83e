"""What the commands that probe share: their options, and the images that these name."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import TYPE_CHECKING

from megavis.commands.arguments import add_device, add_precision, add_step
from megavis.commands.opening import open_held_out, open_shards, training_shards
from megavis.config.arguments import non_negative, positive
from megavis.config.errors import UserError

if TYPE_CHECKING:
    from megavis.evaluation.probe import ProbeData
    from megavis.notebook import Run


def add_data_arguments(parser: argparse.ArgumentParser) -> None:
    """Add which images are probed, and where."""
    parser.add_argument(
        "--train", metavar="FOLDER", help="shard folder; default: the run's data.train"
    )
    parser.add_argument(
        "--validation", metavar="FOLDER", help="shard folder; default: the run's data.validation"
    )
    parser.add_argument(
        "--selection",
        metavar="FOLDER",
        help="shard folder of further training images that choose layer and penalty; default: a"
        " fifth of --train-images does",
    )
    parser.add_argument("--train-images", type=positive, default=5000, help="to fit on, at most")
    parser.add_argument(
        "--validation-images", type=positive, help="to judge by, at most; default: all"
    )
    add_seed_argument(parser)
    add_device(parser)
    add_feature_arguments(parser)


def add_feature_arguments(parser: argparse.ArgumentParser) -> None:
    """Add in which way features are computed, and whether they are kept."""
    add_precision(parser)
    parser.add_argument(
        "--no-cache",
        action="store_true",
        help="compute all features anew and keep none; default: read those that"
        " RUN/evaluation/features has, and keep the others there (see `megavis features`)",
    )


def add_seed_argument(parser: argparse.ArgumentParser) -> None:
    """Add the seed of whatever a probe draws."""
    parser.add_argument(
        "--seed",
        type=non_negative,
        default=0,
        help="of the held-out part, the subsets and the untrained weights",
    )


def add_few_label_arguments(parser: argparse.ArgumentParser) -> None:
    """Add probes with few labels a class."""
    parser.add_argument(
        "--images-per-class",
        type=read_counts,
        default=(),
        metavar="N,N",
        help="probe the best layer also with so few labels, for example 4,25,400; default: no",
    )
    parser.add_argument(
        "--draws", type=positive, default=5, help="random subsets of each such size"
    )


def add_layout_argument(parser: argparse.ArgumentParser) -> None:
    """Add how the processes of a job share the work."""
    parser.add_argument(
        "--tensor-parallel",
        type=positive,
        default=1,
        help="under a launcher: processes that share each layer; the others share the images",
    )


def add_probe_arguments(parser: argparse.ArgumentParser) -> None:
    """Add which networks are probed, and how often each image."""
    add_step(parser)
    parser.add_argument("--untrained-networks", type=positive, default=3, help="to compare with")
    parser.add_argument(
        "--masks",
        type=positive,
        help="random masks of each validation image, whose commonest answer counts; default: 5"
        " where a network's inputs are masked, else 1",
    )


def probe_data(opened: Run, args: argparse.Namespace) -> ProbeData:
    """Open the images that the options name.

    Raises:
        UserError: there are none, or they do not fit the run.
    """
    from megavis.evaluation.probe import ProbeData

    train = args.train or opened.config.data.train
    if not isinstance(train, str):
        raise UserError("the run trained on several shard folders; name one with --train")
    train_data = open_shards(opened, train)
    return ProbeData(
        train_data,
        open_held_out(opened, args.validation, option="--validation"),
        palette=opened.palette if train_data.manifest.kind == "palette" else None,
        num_train=args.train_images,
        num_validation=args.validation_images,
        selection=open_shards(opened, args.selection) if args.selection else None,
        trained_on=training_shards(opened),
    )


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


def read_counts(text: str) -> tuple[int, ...]:
    """Read numbers with commas between them, none from an empty text.

    Raises:
        argparse.ArgumentTypeError: the text is something else.
    """
    try:
        return tuple(int(part) for part in text.split(",") if text)
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"'{text}' is not numbers with commas between them, as 4,25,400"
        ) from None
