"""What the commands of all studies share: options, mistakes and interruptions."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

from benchmarks.results.driver import InterruptedStudyError
from megavis.config.errors import UserError


def study_parser(prog: str, description: str | None, out: Path) -> argparse.ArgumentParser:
    """Return a parser with the options of every study.

    Args:
        prog: the command.
        description: of the study, as it is laid out.
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
    """Run a study; return 2 after a user's mistake or a command that failed."""
    try:
        if options.small and (options.page or options.records):
            raise UserError(
                "--page and --records are for a whole study: the numbers of --small mean nothing"
            )
        return run(options)
    except UserError as error:
        sys.stderr.write(f"error: {error}\n")
        return 2


def interruptible(run: Callable[[], None]) -> int:
    """Run the commands of a study; return 0, or 128 and the signal's number when interrupted."""
    try:
        run()
    except InterruptedStudyError as interrupted:
        say("interrupted; the same command continues")
        return 128 + interrupted.signal
    return 0


def say(line: str) -> None:
    """Print a line at once."""
    print(line, flush=True)
