"""Options shared by several commands."""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from megavis.config.arguments import (
    RUN_NAME,
    RUN_NAME_RULE,
    comma_separated,
    non_negative,
    output_file,
    output_folder,
    positive,
)
from megavis.config.errors import UserError
from megavis.config.places import check_file, check_place


def add_config(
    parser: argparse.ArgumentParser, *, text: str = "YAML file", writes: str | None = None
) -> None:
    """Add the config file and its overrides, which `read_config` reads.

    `writes` is an option for a file, which is checked first.
    """
    parser.add_argument("config", help=text)
    # Without a default argparse lists it among required arguments.
    parser.add_argument(
        "overrides", nargs="*", default=[], metavar="key=value", help="keys to override"
    )

    def check(args: argparse.Namespace) -> None:
        if writes is not None:
            require_writable(getattr(args, writes.removeprefix("--")), writes)
        read_config(args)

    parser.set_defaults(check=check)


def read_config(args: argparse.Namespace) -> None:
    """Load the config named by `add_config` into `args.loaded`."""
    # Imported here: it costs half a second, which `--help` need not wait for.
    from megavis.commands.config import load_user_config

    args.loaded = load_user_config(args.config, args.overrides)


def require_run_name(folder: Path) -> None:
    """Raise UserError unless a run can have the folder's name."""
    if not re.fullmatch(RUN_NAME, folder.name):
        raise UserError(f"{folder}: {RUN_NAME_RULE}; {folder.name!r} does not")


def require_new(path: Path) -> None:
    """Raise UserError unless a new file or folder can be created at `path`; creates nothing."""
    check_place(path)
    if path.exists():
        raise UserError(f"{path} exists; choose another name")


def require_writable(path: Path | None, option: str) -> None:
    """Raise UserError unless the results of `option`, if it was given, can be written to `path`."""
    if path is None:
        return
    if not path.parent.is_dir():
        raise UserError(f"{option}: there is no folder {path.parent}; create it, or name another")
    try:
        check_file(path)
    except UserError as error:
        raise UserError(f"{option}: {error}") from None


def add_result_file(parser: argparse.ArgumentParser, name: str, *, otherwise: str = "") -> None:
    """Add the file for results, by default `name` in RUN/evaluation; see `result_place`.

    `otherwise` says for the help where else it may be.
    """
    parser.add_argument(
        "--out",
        type=output_file,
        metavar="FILE",
        help=f"where to write the results; default: RUN/evaluation/{name}{otherwise}",
    )
    parser.set_defaults(result_name=name)


def add_result_folder(parser: argparse.ArgumentParser) -> None:
    """Add the folder for results, by default RUN/evaluation; see `result_place`."""
    parser.add_argument(
        "--out",
        type=output_folder,
        metavar="FOLDER",
        help="where to write the files; default: RUN/evaluation",
    )
    parser.set_defaults(result_name="")


def result_place(args: argparse.Namespace) -> Path:
    """Return the file or folder for results: --out, or the default in the command's first run."""
    place: Path | None = args.out
    if place is None:
        run: Path = args.run_folder if "run_folder" in args else args.run_folders[0]
        place = run / "evaluation" / args.result_name
    return place


def add_run(parser: argparse.ArgumentParser) -> None:
    """Add the run folder."""
    parser.add_argument("run_folder", metavar="RUN", type=Path, help="run folder")


def add_runs(parser: argparse.ArgumentParser, *, text: str = "run folder") -> None:
    """Add one or more run folders."""
    parser.add_argument("run_folders", metavar="RUN", type=Path, nargs="+", help=text)


def add_step(parser: argparse.ArgumentParser) -> None:
    """Add the option for the checkpoint step."""
    parser.add_argument(
        "--step",
        type=non_negative,
        help="checkpoint; default: the one that fine-tuning chose, or else the newest",
    )


def add_device(parser: argparse.ArgumentParser) -> None:
    """Add the device option."""
    parser.add_argument(
        "--device", choices=("cpu", "cuda"), help="default: cuda if there is a GPU, else cpu"
    )


def add_json(parser: argparse.ArgumentParser) -> None:
    """Add the option to write JSON instead of a table."""
    parser.add_argument("--json", action="store_true", help="write JSON")


def add_precision(parser: argparse.ArgumentParser) -> None:
    """Add the option for the network's compute precision."""
    parser.add_argument(
        "--precision",
        choices=("float32", "bf16"),
        default="float32",
        help="of the network's weights and activations; classifiers are fitted in float32",
    )


def refuse_options(args: argparse.Namespace, options: Iterable[str], to: str) -> None:
    """Raise UserError if options were set to other values than their defaults.

    Args:
        options: as typed, such as `--top-k`.
        to: end of the error message, such as `to a run of igpt`.
    """
    names = {option: option.removeprefix("--").replace("-", "_") for option in options}
    given = [
        option for option, name in names.items() if getattr(args, name) != args.default_of(name)
    ]
    if given:
        verb = "does" if len(given) == 1 else "do"
        raise UserError(f"{', '.join(given)} {verb} not apply {to}")


def add_data_arguments(parser: argparse.ArgumentParser) -> None:
    """Add options for the images to probe."""
    parser.add_argument(
        "--train", metavar="FOLDER", help="shard folder; default: the run's data.train"
    )
    parser.add_argument(
        "--validation", metavar="FOLDER", help="shard folder; default: the run's data.validation"
    )
    parser.add_argument(
        "--selection",
        metavar="FOLDER",
        help="shard folder of other training images for choosing layer and penalty; default: a"
        " fifth of --train-images",
    )
    parser.add_argument(
        "--train-images", type=positive, default=5000, help="maximum number to fit on"
    )
    parser.add_argument(
        "--validation-images", type=positive, help="maximum number to evaluate on; default: all"
    )
    add_seed_argument(parser)
    add_device(parser)
    add_feature_arguments(parser)


def add_classifier_argument(parser: argparse.ArgumentParser) -> None:
    """Add the choice of a recipe for linear classifiers."""
    parser.add_argument(
        "--classifier",
        choices=("standardized", "plain"),
        default="standardized",
        help="standardized: standardise features, choose one of five penalties; plain: unscaled"
        " features and scikit-learn's default penalty (C = 1), as in iGPT, section 3.4",
    )


def add_feature_arguments(parser: argparse.ArgumentParser) -> None:
    """Add options for computing and caching features."""
    add_precision(parser)
    parser.add_argument(
        "--no-cache",
        action="store_true",
        help="neither read nor write cached features; default: read those in"
        " RUN/evaluation/features, and cache the others there (see `megavis features`)",
    )


def add_seed_argument(parser: argparse.ArgumentParser) -> None:
    """Add the random seed of a probe."""
    parser.add_argument(
        "--seed",
        type=non_negative,
        default=0,
        help="random seed of held-out images, subsets and untrained weights",
    )


def add_few_label_arguments(parser: argparse.ArgumentParser) -> None:
    """Add options for probes with few labels per class."""
    parser.add_argument(
        "--images-per-class",
        type=comma_separated(int, "a comma-separated list of numbers such as 4,25,400"),
        default=(),
        metavar="N,N",
        help="also probe the best layer with this many labels per class, such as 4,25,400",
    )
    parser.add_argument("--draws", type=positive, default=5, help="random subsets of each size")


def add_layout_argument(parser: argparse.ArgumentParser) -> None:
    """Add options for sharing work among the processes of a job."""
    parser.add_argument(
        "--tensor-parallel",
        type=positive,
        default=1,
        help="under a launcher: processes that share each layer; groups share the images",
    )


def add_probe_arguments(parser: argparse.ArgumentParser) -> None:
    """Add options for the networks to probe and views per image."""
    add_step(parser)
    parser.add_argument(
        "--untrained-networks", type=positive, default=3, help="number to compare with, 1 or more"
    )
    parser.add_argument(
        "--masks",
        type=positive,
        help="vote over this many random masks of each validation image; default: 5"
        " if a network's inputs are masked, else 1",
    )


def add_image_arguments(parser: argparse.ArgumentParser, *, num_images: int | None) -> None:
    """Add the run, its checkpoint and the held-out images."""
    add_run(parser)
    parser.add_argument(
        "--images", metavar="FOLDER", help="shard folder; default: the run's data.validation"
    )
    parser.add_argument(
        "--num-images",
        type=positive,
        default=num_images,
        help="maximum number" + "; default: all" * (not num_images),
    )
    add_step(parser)
    add_device(parser)


def add_network_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options that name the feature network."""
    parser.add_argument(
        "--inception",
        type=Path,
        metavar="FILE",
        help="Inception weights, weights-inception-2015-12-05-6726825d.pth from torch-fidelity or"
        " pytorch-fid's file of the same weights: the published metrics",
    )
    parser.add_argument(
        "--network",
        choices=("efficientnet-lite0",),
        help="another network, from the extra `evaluation`; its results are not comparable"
        " with published ones",
    )


def add_image_file_arguments(parser: argparse.ArgumentParser) -> None:
    """Add options for reading images and for the device."""
    parser.add_argument(
        "--num-images", type=positive, help="number of images, evenly spread; default: all"
    )
    parser.add_argument(
        "--image-size",
        type=positive,
        help="for images in a folder: resize the shorter side and crop the centre; default: no"
        " resizing",
    )
    parser.add_argument("--batch-size", type=positive, default=64, help="images per batch")
    add_device(parser)


_OPTIONS: dict[str, tuple[type, str]] = {
    "temperature": (
        float,
        "spread of samples: 1 the model's own, 0 the most likely; divides logits, multiplies"
        " standard deviations and noise",
    ),
    "top_k": (int, "sample among the K most likely ids"),
    "top_p": (float, "sample among the most likely ids with total probability P"),
    "sampling_steps": (int, "denoising steps per patch; default: the config's"),
    "probability": (float, "multiplies the logits of a mixture's components"),
    "guidance": (
        float,
        "w of classifier-free guidance, density-based for Gaussians; default: 0",
    ),
    "guidance_power": (
        float,
        "for ids: guidance grows with the tokens, by this power of their share; default: constant",
    ),
    "guidance_schedule": (
        str,
        "for ids and diffusion: constant, or linear in the share of the tokens known; default:"
        " constant",
    ),
    "beams": (int, "sequences that beam search keeps per image"),
    "fans": (int, "candidates per beam at every token"),
    "rounds": (
        int,
        "passes in which tokens are generated, several in each; default: 16 for masked models, 64"
        " where they follow an order, one for each token where they are asked for one by one",
    ),
    "choice_temperature": (
        float,
        "randomness of the tokens that masked models keep; default: 4.5 for ids, as in MaskGIT, 35"
        " for others, as in GIVT at 256²",
    ),
    "groups": (int, "number of groups in which hidden tokens are predicted"),
}


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add sampling options; those that do not apply to a run are rejected later."""
    group = parser.add_argument_group(
        "options of a paper", "Options that do not apply to the run are rejected by name."
    )
    for name, (kind, text) in _OPTIONS.items():
        group.add_argument(spelled(name), type=kind, help=text)


def chosen_options(args: argparse.Namespace) -> dict[str, Any]:
    """Return the given options by name."""
    values = {name: getattr(args, name) for name in _OPTIONS}
    return {name: value for name, value in values.items() if value is not None}


def spelled(name: str) -> str:
    """Return how an option is written on the command line."""
    return f"--{name.replace('_', '-')}"
