"""The `megavis` command.

`commands/options` defines options and imports no torch. The implementation in `commands` is
imported after the command line and the config have been read.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import os
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, NoReturn, TextIO

from megavis import __version__
from megavis.commands.terminal import complete, is_verbose, quietly, set_verbosity
from megavis.config.arguments import (
    ArgumentParser,
    accept_all_text,
    close_output,
    show_fatal_stacks,
)
from megavis.config.errors import (
    CORRUPTION_EXIT_CODE,
    GIVEN_UP_EXIT_CODE,
    NO_ROOM,
    NOT_ALLOWED,
    CorruptionError,
    GivenUpError,
    UnfinishedError,
    UserError,
    permissions_needed,
)
from megavis.config.places import refusal
from megavis.parallel.launch import read_launch

_REFUSED = (*NOT_ALLOWED, *NO_ROOM)
_TRAINING = ("train", "finetune", "search-lr", "sweep")


class Command(NamedTuple):
    """A command.

    Attributes:
        options: module of `commands/options` whose function `add_NAME` adds its options.
        help: its line in `megavis --help`.
        is_recorded: whether the run's report lists it among the commands to repeat.
        adds: name of the function, if it differs from the command's.
    """

    options: str
    help: str
    is_recorded: bool = False
    adds: str | None = None


COMMANDS: Mapping[str, Command] = {
    "train": Command("training", "train a run, or resume it"),
    "search-lr": Command("training", "try learning rates from large to small"),
    "sweep": Command("training", "train a grid over keys and plot heat maps"),
    "parity": Command("training", "compare every layout with a single process"),
    "params": Command("training", "count the parameters of a config"),
    "bench": Command("training", "time a training step by part"),
    "plan": Command("training", "estimate memory, communication and time, and recommend a layout"),
    "sample": Command("images", "generate or complete images", True),
    "probe": Command(
        "evaluation", "accuracy of a linear classifier on the features of each layer", True
    ),
    "transfer": Command(
        "evaluation", "linear probes on a list of labelled data sets, as one table", True
    ),
    "features": Command("evaluation", "list or delete the cached features of a run", True),
    "likelihood": Command("evaluation", "nats and bits per dimension of held-out images", True),
    "evaluate": Command(
        "images",
        "metrics of generated images (FID, SSIM, ...), or of each checkpoint of a run",
        True,
    ),
    "figure": Command(
        "evaluation", "plots of accuracy, errors by patch, completions, ..., as PNG and CSV", True
    ),
    "finetune": Command("training", "train a run's weights on classes, or resume it"),
    "ensemble": Command("evaluation", "average the class probabilities of fine-tuned runs", True),
    "report": Command("runs", "results of runs, on the terminal and as one web page"),
    "runs": Command("runs", "list the runs of a folder", adds="add_runs_table"),
    "config": Command("runs", "show a config, or compare two", adds="add_config_verbs"),
    "checkpoint": Command("runs", "list, verify, prune or convert the checkpoints of a run"),
    "import": Command("runs", "make a run from released weights"),
    "export": Command("runs", "write a run's weights in another format"),
    "schema": Command("runs", "write the JSON schema of config files"),
    "completion": Command("runs", "complete commands in a shell"),
    "doctor": Command("runs", "report what this machine provides, and what is missing"),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; return the exit code.

    For 2, 71 and 75 see `config/errors.py`; 130 is Ctrl-C, 141 a closed pipe.
    """
    accept_all_text()
    if "_ARGCOMPLETE" in os.environ:
        complete(build_parser())
    if arguments is not None:  # In a notebook, words may be paths and numbers.
        arguments = [str(word) for word in arguments]
    is_training = False
    try:
        parsed = read_arguments(arguments)
        is_training = parsed.command in _TRAINING
        return _run(parsed, sys.argv[1:] if arguments is None else arguments)
    except (UserError, CorruptionError, UnfinishedError, OSError, KeyboardInterrupt) as error:
        return _explain(error, is_training=is_training)


def run_process() -> NoReturn:
    """Run the command that this process was started with, and end the process.

    A failed process of a job ends at once, with its traceback written. Python would first close
    what is open, and NCCL would wait for the other processes, which may be waiting for this one.
    So does one whose output cannot be written: Python would replace its exit code by 120.
    """
    try:
        code = main()
    except Exception:
        with contextlib.suppress(OSError):  # such as a full disk under the log
            # torch's, where a job is open, names the rank.
            sys.excepthook(*sys.exc_info())
        code = 1
    streams = [stream for stream in (sys.stdout, sys.stderr) if stream is not None]
    is_written = all([_flush(stream) for stream in streams])
    if not is_written or (code and _rank_and_size()[1] > 1):
        os._exit(code)
    sys.exit(code)


def _flush(stream: TextIO) -> bool:
    """Write what a stream has buffered; return whether that succeeds."""
    try:
        stream.flush()
    except OSError:
        return False
    return True


def _rank_and_size() -> tuple[int, int]:
    """Return this process's rank and its job's size: 0 of 1 where a launcher's are incomplete."""
    try:
        launch = read_launch(os.environ)
    except UserError:
        return 0, 1
    return launch.rank, launch.world_size


def _run(parsed: argparse.Namespace, words: Sequence[str]) -> int:
    """Do the work, and record the command in its runs.

    Here and below, a namespace has only the options of its own command; others have defaults.
    """
    set_verbosity(quiet=parsed.quiet, verbose=parsed.verbose)
    show_fatal_stacks()
    is_recorded = COMMANDS[parsed.command].is_recorded
    try:
        if parsed.check is not None:
            with permissions_needed():
                parsed.check(parsed)
        if is_recorded:
            _require_writable_run(parsed)
        code = _import_work(parsed.run)(parsed)
    except UserError as error:
        # The option of a config file also loads it.
        loaded = vars(parsed).get("loaded")
        if loaded is None:
            raise
        raise loaded.source.located(error) from error
    # A full disk under the log ends no training.
    if parsed.command in _TRAINING:
        _flush(sys.stdout)
    else:
        sys.stdout.flush()
    was_typed = not getattr(parsed, "until_input_ends", False)
    if code == 0 and was_typed and is_recorded:
        _record(parsed, words)
    return code


def _explain(error: BaseException, *, is_training: bool) -> int:
    """Write one line on an error; return the exit code. Raises errors that are not the user's.

    A disk that turns read-only or full during training is not: with code 1, a launcher restarts the
    job.
    """
    if isinstance(error, BrokenPipeError):
        return close_output(error)
    if isinstance(error, KeyboardInterrupt):
        text, code = "interrupted", 130
    elif isinstance(error, CorruptionError):
        text, code = f"corrupted: {error}", CORRUPTION_EXIT_CODE
    elif isinstance(error, UnfinishedError):
        text, code = f"stopped by a signal: {error}", 75
    elif isinstance(error, UserError):
        # The error may have been raised again with file and line.
        given_up = isinstance(error, GivenUpError) or isinstance(error.__cause__, GivenUpError)
        text, code = f"error: {error}", GIVEN_UP_EXIT_CODE if given_up else 2
    elif isinstance(error, OSError) and error.errno in _REFUSED and not is_training:
        # A full disk is often reported without a name.
        place = "" if error.filename is None else f"{error.filename}: "
        text, code = f"error: {place}{error.strerror}", 2
    else:
        raise error
    if code in (2, GIVEN_UP_EXIT_CODE) and is_verbose():
        traceback.print_exception(error)
    with contextlib.suppress(OSError):  # the code matters more than the message
        sys.stderr.write(f"{text}\n")
    return code


def build_parser() -> ArgumentParser:
    """Return the parser of all commands; options are added when a command is used."""
    parser = ArgumentParser(
        prog="megavis",
        description="Pretrain generative vision Transformers in any layout. Make image shards"
        " with `python -m data_tools`.",
        epilog="`megavis COMMAND --help` shows the options of a command and an example.",
    )
    parser.add_argument("--version", action="version", version=f"megavis {__version__}")
    # deepspeed's launcher prepends this; the environment has it too.
    parser.add_argument("--local_rank", type=int, help=argparse.SUPPRESS)
    _add_verbosity(parser, default=False)
    subparsers = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, command in COMMANDS.items():
        subparsers.add_parser(name, help=command.help, fill=partial(_add_options, name))
    return parser


def _add_options(name: str, parser: ArgumentParser) -> None:
    """Add the description, options and implementation of a command.

    Options set the defaults `run`, the function in `commands` as
    "module:function", and `check`, an optional check without torch that is called first.
    """
    parser.set_defaults(check=None)
    command = COMMANDS[name]
    options = importlib.import_module(f"megavis.commands.options.{command.options}")
    getattr(options, command.adds or f"add_{name.replace('-', '_')}")(parser)
    # After the command too, where users write them.
    _add_verbosity(parser, default=argparse.SUPPRESS)


def _add_verbosity(parser: argparse.ArgumentParser, *, default: Any) -> None:
    """Add the options for the amount of output, to verbs too; results are always written."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for verb in action.choices.values():
                _add_verbosity(verb, default=default)
    for option, text in (
        ("--quiet", "say nothing on the way: no progress bars, no warnings"),
        ("--verbose", "let libraries log and warn too, and show where an error comes from"),
    ):
        parser.add_argument(option, action="store_true", default=default, help=text)


def _import_work(reference: str) -> Callable[[argparse.Namespace], int]:
    """Import the implementation of a command."""
    module, _, function = reference.partition(":")
    with quietly():
        work: Callable[[argparse.Namespace], int] = getattr(
            importlib.import_module(f"megavis.commands.{module}"), function
        )
    return work


def read_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the arguments after `megavis`; None for this process's own.

    Raises:
        UserError: there is no such command or option.
    """
    parsed, words = build_parser().parse_known_args(arguments)
    # argparse accepts key=value words only if adjacent; users put options between them.
    if words and (not hasattr(parsed, "overrides") or any(w.startswith("-") for w in words)):
        parsed.refuse(f"unrecognized arguments: {' '.join(words)}")
    if words:
        parsed.overrides += words
    return parsed


def _require_writable_run(parsed: argparse.Namespace) -> None:
    """Raise UserError if results would go to a read-only run folder, or to an exported one."""
    folder = getattr(parsed, "run_folder", None)
    if parsed.command == "figure" and folder is None:
        folder = parsed.run_folders[0]
    goes_elsewhere = any(getattr(parsed, name, None) for name in ("out", "npz"))
    only_lists = not getattr(parsed, "clear", True)
    if folder is None or only_lists or not folder.is_dir():
        return
    # Features are cached in the folder, wherever the results go.
    if _is_exported(folder) and not (goes_elsewhere and getattr(parsed, "no_cache", True)):
        raise UserError(
            f"{folder} is an exported folder, and results in it would be shared with it; make a"
            f" run of it with `megavis import huggingface {folder} runs/NAME`"
        )
    if not goes_elsewhere and (why := refusal(folder)):
        way = "name another place with --out" if hasattr(parsed, "out") else "copy the run"
        text = f"{folder}: nothing can be written there ({why}), and the results go there"
        raise UserError(f"{text}; {way}")


def _is_exported(folder: Path) -> bool:
    return all((folder / name).exists() for name in ("config.yaml", "config.json"))


def _record(parsed: argparse.Namespace, arguments: Sequence[str]) -> None:
    """Record the command in each of its runs whose folder is writable."""
    # Imported here: it imports numpy.
    from megavis.training.provenance import record_command

    if _rank_and_size()[0] > 0:
        return
    folders = [*getattr(parsed, "run_folders", ()), getattr(parsed, "run_folder", None)]
    for folder in folders:
        with contextlib.suppress(OSError):
            if folder is not None and not _is_exported(folder):
                record_command(folder, arguments)


if __name__ == "__main__":
    run_process()
