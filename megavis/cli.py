"""The `megavis` command: one subcommand a file in `commands/`."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import logging
import os
import sys
from collections.abc import Sequence

from megavis import __version__
from megavis.config.arguments import ArgumentParser
from megavis.config.errors import (
    CORRUPTION_EXIT_CODE,
    CorruptionError,
    UnfinishedError,
    UserError,
)
from megavis.parallel.launch import read_launch

# Each command and its module; `import` is a word of Python, so its module has another name.
_COMMANDS = {
    "train": "train",
    "search-lr": "search_lr",
    "sweep": "sweep",
    "parity": "parity",
    "params": "params",
    "plan": "plan",
    "sample": "sample",
    "probe": "probe",
    "transfer": "transfer",
    "features": "features",
    "likelihood": "likelihood",
    "evaluate": "evaluate",
    "figure": "figure",
    "finetune": "finetune",
    "ensemble": "ensemble",
    "report": "report",
    "checkpoint": "checkpoint",
    "import": "import_",
    "export": "export",
    "schema": "schema",
    "doctor": "doctor",
}

_RECORDED = (
    "sample",
    "probe",
    "figure",
    "transfer",
    "features",
    "likelihood",
    "evaluate",
    "ensemble",
)
"""Commands that make something of a run; reports tell how to repeat them."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code: 2, 71 and 75 as `config/errors.py` has them."""
    # It logs that there is no CUDA wherever a toolkit is installed without a GPU; whichever import
    # comes first would show it. `megavis doctor` says what this machine has.
    logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)
    try:
        parsed = read_arguments(arguments)
        code: int = parsed.run(parsed)
    except UserError as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    except CorruptionError as error:
        sys.stderr.write(f"corrupted: {error}\n")
        return CORRUPTION_EXIT_CODE
    except UnfinishedError as error:
        sys.stderr.write(f"stopped by a signal: {error}\n")
        return 75
    was_typed = not getattr(parsed, "until_input_ends", False)
    if code == 0 and was_typed and parsed.command in _RECORDED:
        _record(parsed, sys.argv[1:] if arguments is None else arguments)
    return code


def build_parser() -> ArgumentParser:
    """Return the parser of all commands."""
    parser = ArgumentParser(
        prog="megavis",
        description="Pretrain generative vision Transformers on any layout. Shards of images are"
        " made by `python -m data_tools`.",
        epilog="`megavis COMMAND --help` shows the options of a command, and an example.",
    )
    parser.add_argument("--version", action="version", version=f"megavis {__version__}")
    # deepspeed's launcher puts this in front of everything; the environment says it too.
    parser.add_argument("--local_rank", type=int, help=argparse.SUPPRESS)
    subparsers = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for module in _COMMANDS.values():
        importlib.import_module(f"megavis.commands.{module}").add_parser(subparsers)
    return parser


def read_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the words after `megavis`; those of this process where None.

    Raises:
        UserError: they are no command, or not its options.
    """
    parsed, words = build_parser().parse_known_args(arguments)
    # argparse takes key=value words only where they stand together; users put options between.
    if words and (not hasattr(parsed, "overrides") or any(w.startswith("-") for w in words)):
        raise UserError(
            f"unrecognized arguments: {' '.join(words)}; `megavis {parsed.command} --help` shows"
            " what there is"
        )
    if words:
        parsed.overrides += words
    return parsed


def _record(parsed: argparse.Namespace, arguments: Sequence[str]) -> None:
    """Let each run that the command was given remember it, where its folder can be written."""
    from megavis.training.provenance import record_command

    with contextlib.suppress(UserError):  # A launcher that says too little names nobody else.
        if read_launch(os.environ).rank > 0:
            return
    folders = [*getattr(parsed, "run_folders", ()), getattr(parsed, "run_folder", None)]
    for folder in folders:
        with contextlib.suppress(OSError):
            if folder is not None:
                record_command(folder, arguments)


if __name__ == "__main__":
    sys.exit(main())
