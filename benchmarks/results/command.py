"""Shared code of the studies' commands: options, mistakes and interruptions."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TypeVar

from benchmarks.results.driver import InterruptedStudyError, run_tasks
from benchmarks.results.records import AnyStudy, Records
from benchmarks.results.tasks import Task, TrainedMethod
from megavis.config.errors import UserError

_Method = TypeVar("_Method", bound=TrainedMethod)


def study_parser(prog: str, description: str | None, out: Path) -> argparse.ArgumentParser:
    """Return a parser with the options of every study.

    Args:
        prog: the command.
        description: description of the study, shown as it is laid out.
        out: default of `--out`.
    """
    made = argparse.ArgumentParser(
        prog=prog, description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("--out", type=Path, default=out, help=f"default: {out}")
    made.add_argument("--small", action="store_true", help="every command, on few images")
    made.add_argument(
        "--tables", action="store_true", help="run nothing: write the tables of what has finished"
    )
    made.add_argument("--page", type=Path, help="also write tables and pictures into this page")
    made.add_argument(
        "--records",
        type=Path,
        metavar="FOLDER",
        help="also keep here what the tables read of finished methods, without weights; methods "
        "that another machine has recorded are not trained again",
    )
    return made


def run_command(run: Callable[[argparse.Namespace], int], options: argparse.Namespace) -> int:
    """Run a study; return 2 after a user's mistake or a failed command."""
    try:
        if options.small and (options.page or options.records):
            raise UserError(
                "--page and --records are for a whole study: the numbers of --small mean nothing"
            )
        return run(options)
    except UserError as error:
        sys.stderr.write(f"error: {error}\n")
        return 2


def run_methods(
    study: AnyStudy[_Method],
    methods: Sequence[_Method],
    options: argparse.Namespace,
    *,
    tasks: Callable[[_Method], Iterable[Task]],
    write_page: Callable[[], list[Path]],
) -> int:
    """Run what has not been recorded, and write page and records after each method.

    Args:
        study: whose records are copied and kept.
        methods: of the study that can run here, in order.
        options: of `study_parser`.
        tasks: the commands of a method, in order.
        write_page: returns what it has written.

    Returns:
        0, or 128 and the signal's number when interrupted.

    Raises:
        UserError: a command has failed.
    """
    folder = options.out.resolve()
    records = None if options.records is None else Records(options.records.resolve())
    recorded = [] if records is None else records.copy_to(study, folder)
    for method in recorded:
        say(f"{method.name} ({method.runs[-1]}): finished, by {options.records}")

    def write() -> list[Path]:
        if records is not None:
            records.keep(study, folder)
        return write_page()

    code = 0
    # A page that cannot be written must not be noticed only after hours of work.
    write()
    try:
        for method in () if options.tables else methods:
            if method not in recorded:
                run_tasks(tasks(method), folder, say=say)
                write()
    except InterruptedStudyError as interrupted:
        say("interrupted; the same command continues")
        code = 128 + interrupted.signal
    for path in write():
        say(str(path))
    return code


def say(line: str) -> None:
    """Print a line at once."""
    print(line, flush=True)
