"""What several commands ask for in the same words: a config, a run, its checkpoint, a device."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from megavis.config.arguments import non_negative
from megavis.config.errors import UserError

if TYPE_CHECKING:
    from megavis.config.load import LoadedConfig


def add_config(parser: argparse.ArgumentParser, *, text: str = "YAML file") -> None:
    """Add the config and the keys that are changed; `read_config` reads them."""
    parser.add_argument("config", help=text)
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="keys to change")


def read_config(args: argparse.Namespace) -> LoadedConfig:
    """Read the config that `add_config` asks for; raises UserError as `load_config`."""
    if not Path(args.config).exists():
        raise UserError(f"{args.config}: no such config file")
    return load_user_config(args.config, args.overrides)


def load_user_config(path: str, overrides: Sequence[str]) -> LoadedConfig:
    """Load a config file of a user's, whose epochs are those of its shards; see `load_config`."""
    from megavis.config.load import load_config
    from megavis.data.format.manifest import num_images

    return load_config(path, overrides, count_images=num_images)


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


def add_precision(parser: argparse.ArgumentParser) -> None:
    """Add in which precision the network computes."""
    parser.add_argument(
        "--precision",
        choices=("float32", "bf16"),
        default="float32",
        help="of the network's weights and activations; what is fitted on them is float32",
    )
