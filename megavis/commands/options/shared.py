"""Options that several commands have: each is written here once."""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from megavis.config.arguments import non_negative, positive
from megavis.config.errors import UserError


def add_config(parser: argparse.ArgumentParser, *, text: str = "YAML file") -> None:
    """Add the config and the keys that are changed; `read_config` reads them."""
    parser.add_argument("config", help=text)
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="keys to change")
    parser.set_defaults(check=read_config)


def read_config(args: argparse.Namespace) -> None:
    """Read the config that `add_config` asks for into `args.loaded`.

    Raises:
        UserError: as `load_config`.
    """
    # Here, since it costs half a second that `--help` need not wait for.
    from megavis.commands.configs import load_user_config

    args.loaded = load_user_config(args.config, args.overrides)


def add_run(parser: argparse.ArgumentParser) -> None:
    """Add the run folder."""
    parser.add_argument("run_folder", metavar="RUN", type=Path, help="run folder")


def add_runs(parser: argparse.ArgumentParser, *, text: str = "run folder") -> None:
    """Add one run folder or several."""
    parser.add_argument("run_folders", metavar="RUN", type=Path, nargs="+", help=text)


def add_step(parser: argparse.ArgumentParser) -> None:
    """Add which checkpoint of the run."""
    parser.add_argument("--step", type=non_negative, help="checkpoint; default: the newest")


def add_device(parser: argparse.ArgumentParser) -> None:
    """Add where the command computes."""
    parser.add_argument(
        "--device", choices=("cpu", "cuda"), help="default: cuda where there is a GPU, else cpu"
    )


def add_json(parser: argparse.ArgumentParser) -> None:
    """Add that the command writes JSON in place of a table."""
    parser.add_argument("--json", action="store_true", help="write JSON")


def add_precision(parser: argparse.ArgumentParser) -> None:
    """Add in which precision the network computes."""
    parser.add_argument(
        "--precision",
        choices=("float32", "bf16"),
        default="float32",
        help="of the network's weights and activations; what is fitted on them is float32",
    )


def refuse_options(args: argparse.Namespace, options: Iterable[str], to: str) -> None:
    """Refuse those of the options that were given another value than their default.

    Args:
        args: what `ArgumentParser` has read.
        options: as a user writes them, `--top-k`.
        to: what they do not apply to, as the end of a sentence: `to a run of igpt`.

    Raises:
        UserError: one or several were given.
    """
    given = [option for option in options if _is_given(args, option)]
    if given:
        verb = "does" if len(given) == 1 else "do"
        raise UserError(f"{', '.join(given)} {verb} not apply {to}")


def _is_given(args: argparse.Namespace, option: str) -> bool:
    name = option.removeprefix("--").replace("-", "_")
    return bool(getattr(args, name) != args.default_of(name))


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
        help="compute all features again and keep none; default: read those that"
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


def add_image_arguments(parser: argparse.ArgumentParser, *, num_images: int | None) -> None:
    """Add the run, its checkpoint, and which held-out images."""
    add_run(parser)
    parser.add_argument(
        "--images", metavar="FOLDER", help="shard folder; default: the run's data.validation"
    )
    parser.add_argument(
        "--num-images",
        type=positive,
        default=num_images,
        help="at most" + "; default: all" * (not num_images),
    )
    add_step(parser)
    add_device(parser)


def add_network_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options that name the feature network."""
    parser.add_argument(
        "--inception",
        type=Path,
        metavar="FILE",
        help="weights of Inception, weights-inception-2015-12-05-6726825d.pth of torch-fidelity or"
        " pytorch-fid's file of the same weights: the published metrics",
    )
    parser.add_argument(
        "--network",
        choices=("efficientnet-lite0",),
        help="another network, which comes with the extra `evaluation`; its numbers compare with"
        " no published ones",
    )


def add_image_file_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what of the images is read, and where they are looked at."""
    parser.add_argument(
        "--num-images", type=positive, help="so many of them, evenly spread; default: all"
    )
    parser.add_argument(
        "--image-size",
        type=positive,
        help="of images in a folder: resize the shorter side to it and cut the middle; default: as"
        " they are",
    )
    parser.add_argument("--batch-size", type=positive, default=64, help="images at once")
    add_device(parser)


_OPTIONS: dict[str, tuple[type, str]] = {
    "temperature": (
        float,
        "spread of what is drawn: 1 the model's own, 0 the likeliest; divides logits, multiplies"
        " deviations and noise",
    ),
    "top_k": (int, "choose among so many ids"),
    "top_p": (float, "choose among ids of so much probability"),
    "sampling_steps": (int, "from noise to a patch; default: the config's"),
    "probability": (float, "multiplies the logits of a mixture's components"),
    "guidance": (float, "w of density-based classifier-free guidance; default: 0"),
    "beams": (int, "sequences that beam search keeps of each image"),
    "fans": (int, "candidates for each of them at every token"),
    "rounds": (int, "in which masked models draw; default: 16"),
    "choice_temperature": (float, "chance in what masked models keep; default: 35"),
    "groups": (int, "in which hidden tokens are predicted"),
}


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add them; one that does not apply to a run is refused when its paper is known."""
    group = parser.add_argument_group(
        "options of a paper", "One that does not apply to the run is refused by name."
    )
    for name, (kind, text) in _OPTIONS.items():
        group.add_argument(spelled(name), type=kind, help=text)


def chosen_options(args: argparse.Namespace) -> dict[str, Any]:
    """Return those that were given, by name."""
    values = {name: getattr(args, name) for name in _OPTIONS}
    return {name: value for name, value in values.items() if value is not None}


def spelled(name: str) -> str:
    """Return how an option is written on the command line."""
    return f"--{name.replace('_', '-')}"
