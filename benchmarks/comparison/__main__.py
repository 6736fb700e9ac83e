"""`python -m benchmarks.comparison`; see the package's docstring."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import benchmarks.comparison as package
from benchmarks.comparison.page import write_page
from benchmarks.comparison.study import Study
from benchmarks.results.command import run_command, run_methods, study_parser


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    return study_parser("python -m benchmarks.comparison", package.__doc__, Path("comparison"))


def main(words: Sequence[str] | None = None) -> int:
    """Run the study, and write its table.

    Returns:
        0 if everything has finished, 2 after a user's mistake or a failed command, 128 plus the
        signal's number if interrupted.
    """
    return run_command(_run, parser().parse_args(words))


def _run(options: argparse.Namespace) -> int:
    study = Study.read(small=options.small)
    folder = options.out.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    return run_methods(
        study,
        study.methods,
        options,
        tasks=lambda method: (*study.shards(method), *study.trainings(method)),
        write_page=lambda: write_page(study, folder, options.page),
    )


if __name__ == "__main__":
    sys.exit(main())
