"""`python -m benchmarks.results`; see the package's docstring."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import benchmarks.results as package
from benchmarks.results.driver import InterruptedStudyError, run_tasks
from benchmarks.results.page import write_page
from benchmarks.results.records import Records
from benchmarks.results.sources import NAMES, find_sources, shard_tasks
from benchmarks.results.tasks import Study
from megavis.config.errors import UserError

_OUT = Path("results")


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    made = argparse.ArgumentParser(
        prog="python -m benchmarks.results",
        description=package.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    made.add_argument("data", type=Path, metavar="DATA", help="folder with the raw data")
    made.add_argument("--out", type=Path, default=_OUT, help=f"default: {_OUT}")
    made.add_argument("--small", action="store_true", help="every command, on few images")
    counts = {
        "--images": "images of CIFAR-10 seen in pre-training",
        "--finetune-images": "images of CIFAR-10 seen in fine-tuning",
        "--mnist-images": "images seen of MNIST",
        "--probe-images": "training images for linear probes on test images",
    }
    for option, text in counts.items():
        made.add_argument(option, type=_count, metavar="N", help=f"{text}; default: study.yaml's")
    made.add_argument(
        "--without-test", action="store_true", help="do not look at the classes of test images yet"
    )
    made.add_argument(
        "--tables", action="store_true", help="run nothing: write the tables of what has finished"
    )
    made.add_argument("--page", type=Path, help="also write tables and pictures into this page")
    made.add_argument(
        "--records",
        type=Path,
        metavar="FOLDER",
        help="also keep here what the tables read of finished methods, without weights; those of "
        "other machines are not trained again",
    )
    return made


def _count(text: str) -> int:
    number = int(text) if text.isdigit() else 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of images")
    return number


def main(words: Sequence[str] | None = None) -> int:
    """Run the study, and write its tables.

    Returns:
        0 where everything has finished, 2 after a user's mistake or a command that failed, 128
        and the signal's number when interrupted.
    """
    options = parser().parse_args(words)
    try:
        return _run(options)
    except UserError as error:
        sys.stderr.write(f"error: {error}\n")
        return 2


def _run(options: argparse.Namespace) -> int:
    given = {
        ("cifar10", "pretraining"): options.images,
        ("cifar10", "finetuning"): options.finetune_images,
        ("mnist", "pretraining"): options.mnist_images,
    }
    images = {key: number for key, number in given.items() if number is not None}
    study = Study.read(small=options.small, images=images, probe=options.probe_images)
    if options.small and (options.page or options.records):
        raise UserError(
            "--page and --records are for a whole study: the numbers of --small mean nothing"
        )
    folder = options.out.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    sources = find_sources(options.data.resolve(), folder / "unpacked")
    methods = [method for method in study.methods if sources.place(method.data) is not None]
    for data, name in NAMES.items():
        _say(f"{name}: {sources.place(data) or 'not found, so its runs are left out'}")
    records = None if options.records is None else Records(options.records.resolve())
    recorded = [] if records is None else records.copy_to(study, folder)
    for method in recorded:
        _say(f"{method.name} ({NAMES[method.data]}): finished, by {options.records}")
    code = 0
    try:
        for method in () if options.tables else methods:
            if method in recorded:
                continue
            shards = shard_tasks(sources, method.reads, folder, small=options.small)
            run_tasks(shards, folder, say=_say)
            run_tasks(study.trainings(method), folder, say=_say)
            if not options.without_test:
                run_tasks(study.tests(method), folder, say=_say)
    except InterruptedStudyError as interrupted:
        _say("interrupted; the same command continues")
        code = 128 + interrupted.signal
    if records is not None:
        records.keep(study, folder)
    for path in write_page(study, folder, options.page):
        _say(str(path))
    return code


def _say(line: str) -> None:
    print(line, flush=True)


if __name__ == "__main__":
    sys.exit(main())
