"""`python -m benchmarks.comparison`; see the package's docstring."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import benchmarks.comparison as package
from benchmarks.comparison.page import write_page
from benchmarks.comparison.study import Study
from benchmarks.results.command import interruptible, run_command, say, study_parser
from benchmarks.results.driver import run_tasks
from benchmarks.results.records import Records


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    return study_parser("python -m benchmarks.comparison", package.__doc__, Path("comparison"))


def main(words: Sequence[str] | None = None) -> int:
    """Run the study, and write its table.

    Returns:
        0 where everything has finished, 2 after a user's mistake or a command that failed, 128
        and the signal's number when interrupted.
    """
    return run_command(_run, parser().parse_args(words))


def _run(options: argparse.Namespace) -> int:
    study = Study.read(small=options.small)
    folder = options.out.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    records = None if options.records is None else Records(options.records.resolve())
    recorded = [] if records is None else records.copy_to(study, folder)
    for method in recorded:
        say(f"{method.name}, seed {method.seed}: finished, by {options.records}")

    def write() -> list[Path]:
        if records is not None:
            records.keep(study, folder)
        return write_page(study, folder, options.page)

    def run_all() -> None:
        for method in () if options.tables else study.methods:
            if method not in recorded:
                run_tasks(study.shards(method), folder, say=say)
                run_tasks(study.trainings(method), folder, say=say)
                write()

    code = interruptible(run_all)
    for path in write():
        say(str(path))
    return code


if __name__ == "__main__":
    sys.exit(main())
