"""The `megavis` command.

The options of a command lie in `commands/options`, which imports no torch; its work in `commands`,
imported when the command line and the config have been read.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import logging
import os
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from megavis import __version__
from megavis.commands.completion import complete
from megavis.commands.quiet import is_verbose, quietly, talk
from megavis.config.arguments import ArgumentParser
from megavis.config.errors import (
    CORRUPTION_EXIT_CODE,
    CorruptionError,
    UnfinishedError,
    UserError,
)
from megavis.parallel.launch import read_launch


class Command(NamedTuple):
    """A command.

    Attributes:
        options: module of `commands/options` whose function `add_NAME` adds its options.
        help: what it does, in a line of `megavis --help`.
        is_recorded: it makes something of a run, whose report says how to repeat it.
        adds: the function, where it has another name than the command.
    """

    options: str
    help: str
    is_recorded: bool = False
    adds: str | None = None


COMMANDS: Mapping[str, Command] = {
    "train": Command("training", "train a run, or resume it"),
    "search-lr": Command("training", "try learning rates from large to small"),
    "sweep": Command("training", "train a grid over two keys and draw a heat-map"),
    "parity": Command("training", "compare every layout with one process"),
    "params": Command("training", "count the parameters of a config"),
    "bench": Command("training", "time a training step, and say where the time goes"),
    "plan": Command("training", "estimate memory, traffic and time, and recommend a layout"),
    "sample": Command("images", "draw images, or complete photographs", True),
    "probe": Command(
        "evaluation", "accuracy of a linear classifier on the features of each layer", True
    ),
    "transfer": Command(
        "evaluation", "linear probes on a list of labelled data sets, as one table", True
    ),
    "features": Command(
        "evaluation", "list the features that a run folder keeps, or delete them", True
    ),
    "likelihood": Command("evaluation", "nats and bits a dimension of held-out images", True),
    "evaluate": Command(
        "images",
        "how good images are that a run made (FID, SSIM, ...), and each checkpoint of a run",
        True,
    ),
    "figure": Command(
        "figures", "accuracy over depth or loss, errors by patch, completions, as PNG and CSV", True
    ),
    "finetune": Command("training", "train a run's weights on classes, or resume it"),
    "ensemble": Command("evaluation", "average the class probabilities of fine-tuned runs", True),
    "report": Command("runs", "what runs have come to, on one screen and as one web page"),
    "runs": Command("runs", "list the runs of a folder", adds="add_runs_table"),
    "config": Command("runs", "show a config, or compare two", adds="add_config_verbs"),
    "checkpoint": Command("runs", "list, verify, prune or convert the checkpoints of a run"),
    "import": Command("runs", "make a run out of released weights"),
    "export": Command("runs", "write a run's weights in a form that others read"),
    "schema": Command("runs", "write the JSON schema of config files"),
    "completion": Command("runs", "complete commands in a shell"),
    "doctor": Command("runs", "say what this machine has, and what is missing for what"),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code: 2, 71 and 75 as `config/errors.py` has them."""
    # It logs that there is no CUDA wherever a toolkit is installed without a GPU; whichever import
    # comes first would show it. `megavis doctor` says what this machine has.
    logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)
    if "_ARGCOMPLETE" in os.environ:
        complete(build_parser())
    try:
        parsed = read_arguments(arguments)
        talk(quiet=parsed.quiet, verbose=parsed.verbose)
        if parsed.check is not None:
            parsed.check(parsed)
        code = _import_work(parsed.run)(parsed)
    except UserError as error:
        if is_verbose():
            traceback.print_exc()
        sys.stderr.write(f"error: {error}\n")
        return 2
    except CorruptionError as error:
        sys.stderr.write(f"corrupted: {error}\n")
        return CORRUPTION_EXIT_CODE
    except UnfinishedError as error:
        sys.stderr.write(f"stopped by a signal: {error}\n")
        return 75
    was_typed = not getattr(parsed, "until_input_ends", False)
    if code == 0 and was_typed and COMMANDS[parsed.command].is_recorded:
        _record(parsed, sys.argv[1:] if arguments is None else arguments)
    return code


def build_parser() -> ArgumentParser:
    """Return the parser of all commands; each is filled when it is used."""
    parser = ArgumentParser(
        prog="megavis",
        description="Pretrain generative vision Transformers on any layout. Shards of images are"
        " made by `python -m data_tools`.",
        epilog="`megavis COMMAND --help` shows the options of a command, and an example.",
    )
    parser.add_argument("--version", action="version", version=f"megavis {__version__}")
    # deepspeed's launcher puts this in front of everything; the environment says it too.
    parser.add_argument("--local_rank", type=int, help=argparse.SUPPRESS)
    _add_talk(parser, default=False)
    subparsers = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, command in COMMANDS.items():
        subparsers.add_parser(name, help=command.help, fill=partial(_add_options, name))
    return parser


def _add_options(name: str, parser: ArgumentParser) -> None:
    """Add description and options of a command, and what it does with them.

    Options set the defaults `run`, the function in `commands` that does the work as
    "module:function", and `check`, called first where there is something that needs no torch.
    """
    parser.set_defaults(check=None)
    command = COMMANDS[name]
    options = importlib.import_module(f"megavis.commands.options.{command.options}")
    getattr(options, command.adds or f"add_{name.replace('-', '_')}")(parser)
    # Not in front of the command alone: it is where users write them.
    _add_talk(parser, default=argparse.SUPPRESS)


def _add_talk(parser: argparse.ArgumentParser, *, default: Any) -> None:
    """Add how much is said on the way, to verbs too; results are always written."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for verb in action.choices.values():
                _add_talk(verb, default=default)
    for option, text in (
        ("--quiet", "say nothing on the way: no progress bars, no warnings"),
        ("--verbose", "let libraries log and warn too, and show where an error comes from"),
    ):
        parser.add_argument(option, action="store_true", default=default, help=text)


def _import_work(reference: str) -> Callable[[argparse.Namespace], int]:
    """Import what does the work of a command, the one place where that is done."""
    module, _, function = reference.partition(":")
    with quietly():
        work: Callable[[argparse.Namespace], int] = getattr(
            importlib.import_module(f"megavis.commands.{module}"), function
        )
    return work


def read_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the words after `megavis`; those of this process where None.

    Raises:
        UserError: they are no command, or not its options.
    """
    parsed, words = build_parser().parse_known_args(arguments)
    # argparse takes key=value words only if adjacent; users put options between them.
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
    # Not at the top: it imports numpy.
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
