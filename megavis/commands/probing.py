"""What the commands that probe share: options, images, networks."""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from megavis.config.errors import UserError

if TYPE_CHECKING:
    from megavis.data.dataset import ShardDataset
    from megavis.data.overlap import Shards
    from megavis.evaluation.probe import ProbeData
    from megavis.notebook import Run


def add_data_arguments(parser: argparse.ArgumentParser) -> None:
    """Add which images are probed, and where."""
    parser.add_argument("--train", help="shard folder; default: the run's data.train")
    parser.add_argument("--validation", help="shard folder; default: the run's data.validation")
    parser.add_argument(
        "--selection",
        help="shard folder of further training images that choose layer and penalty; default: a"
        " fifth of --train-images does",
    )
    parser.add_argument("--train-images", type=int, default=5000, help="at most; default: 5000")
    parser.add_argument("--validation-images", type=int, help="at most; default: all")
    parser.add_argument(
        "--seed",
        type=int,
        default=0,
        help="of held-out part, subsets and untrained weights; default: 0",
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), help="default: CUDA where there is")
    add_feature_arguments(parser)


def add_feature_arguments(parser: argparse.ArgumentParser) -> None:
    """Add in which way features are computed, and whether they are kept."""
    parser.add_argument(
        "--precision",
        choices=("float32", "bf16"),
        default="float32",
        help="of the network's weights and activations; the classifiers' is float32",
    )
    parser.add_argument(
        "--no-cache",
        action="store_true",
        help="compute all features; default: what RUN/evaluation/features has of them is read, the"
        " others are kept there (`megavis features RUN --clear` deletes them)",
    )


def add_layout_argument(parser: argparse.ArgumentParser) -> None:
    """Add how the processes of a job share the work."""
    parser.add_argument(
        "--tensor-parallel",
        type=int,
        default=1,
        metavar="N",
        help="under a launcher: processes that share each layer; the others share the images",
    )


def add_network_arguments(parser: argparse.ArgumentParser) -> None:
    """Add which networks are probed, and how often each image."""
    parser.add_argument("--step", type=int, help="checkpoint; default: the newest")
    parser.add_argument(
        "--untrained-networks", type=int, default=3, help="to compare with; default: 3"
    )
    parser.add_argument(
        "--masks",
        type=int,
        help="random masks of each validation image, whose commonest answer counts; default: 5"
        " where a network's inputs are masked, else 1",
    )


def check_arguments(args: argparse.Namespace) -> None:
    """Refuse numbers out of range.

    Raises:
        UserError: in one sentence.
    """
    if args.train_images < 1 or (args.validation_images or 1) < 1:
        raise UserError("--train-images and --validation-images must be at least 1")
    if getattr(args, "untrained_networks", 1) < 1 or args.seed < 0:
        raise UserError("--untrained-networks must be at least 1, and --seed at least 0")
    if (getattr(args, "masks", None) or 1) < 1:
        raise UserError("--masks must be at least 1")


@contextlib.contextmanager
def job_closed() -> Iterator[None]:
    """Leave the job that opening a run has made, also after an error."""
    from megavis.parallel.context import close_context, current_context

    try:
        yield
    finally:
        if current_context() is not None:
            close_context()


def open_run(
    folder: Path, *, step: int | None, device: str | None = None, precision: str = "float32"
) -> Run:
    """Open a run without the libraries' chatter; raises UserError as `Run.open`."""
    from megavis.commands.quiet import quietly

    with quietly():
        import torch

        from megavis.notebook import Run

        dtype = torch.bfloat16 if precision == "bf16" else torch.float32
        return Run.open(folder, step=step, device=device, dtype=dtype)


def probe_data(opened: Run, args: argparse.Namespace) -> ProbeData:
    """Open the images that the options name.

    Raises:
        UserError: there are none, or they do not fit the run.
    """
    from megavis.evaluation.probe import ProbeData

    validation = args.validation or opened.config.data.validation
    if validation is None:
        raise UserError("the run has no data.validation; name a shard folder with --validation")
    train = args.train or opened.config.data.train
    if not isinstance(train, str):
        raise UserError("the run trained on several shard folders; name one with --train")
    train_data, validation_data = (open_shards(opened, path) for path in (train, validation))
    return ProbeData(
        train_data,
        validation_data,
        palette=opened.palette if train_data.manifest.kind == "palette" else None,
        num_train=args.train_images,
        num_validation=args.validation_images,
        selection=open_shards(opened, args.selection) if args.selection else None,
        trained_on=training_shards(opened),
    )


def training_shards(opened: Run) -> Sequence[Shards]:
    """Return what a run was trained on, as far as it is still there: no image of it may judge."""
    from megavis.evaluation.trained_on import training_shards

    return list(training_shards(opened.config))


def open_shards(opened: Run, folder: str) -> ShardDataset:
    """Open images for evaluation, as the run takes them.

    Raises:
        UserError: they do not fit the run, or were made with another palette.
    """
    from megavis.data.dataset import ShardDataset
    from megavis.data.transforms import evaluation_transform

    data = opened.config.data
    dataset = ShardDataset(folder, evaluation_transform(data), cache=data.cache)
    for complaint in opened.objective.check_data(dataset.manifest):
        raise UserError(f"{folder} {complaint}")
    if dataset.manifest.kind == "palette" and dataset.manifest.identity != opened.palette.sha256:
        raise UserError(f"{folder} was made with another palette than the run")
    return dataset


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
