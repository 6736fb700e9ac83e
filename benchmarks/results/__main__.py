"""`python -m benchmarks.results`; see the package's docstring."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import benchmarks.results as package
from benchmarks.results.command import run_command, run_methods, say, study_parser
from benchmarks.results.page import write_page
from benchmarks.results.sources import NAMES, find_sources, shard_tasks
from benchmarks.results.tasks import Method, Study, Task


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    made = study_parser("python -m benchmarks.results", package.__doc__, Path("results"))
    made.add_argument("data", type=Path, metavar="DATA", help="folder with the raw data")
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
    return made


def _count(text: str) -> int:
    number = int(text) if text.isdigit() else 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of images")
    return number


def main(words: Sequence[str] | None = None) -> int:
    """Run the study, and write its tables.

    Returns:
        0 if everything has finished, 2 after a user's mistake or a failed command, 128 plus the
        signal's number if interrupted.
    """
    return run_command(_run, parser().parse_args(words))


def _run(options: argparse.Namespace) -> int:
    given = {
        ("cifar10", "pretraining"): options.images,
        ("cifar10", "finetuning"): options.finetune_images,
        ("mnist", "pretraining"): options.mnist_images,
    }
    images = {key: number for key, number in given.items() if number is not None}
    study = Study.read(small=options.small, images=images, probe=options.probe_images)
    folder = options.out.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    sources = find_sources(options.data.resolve(), folder / "unpacked")
    methods = [method for method in study.methods if sources.place(method.data) is not None]
    for data, name in NAMES.items():
        say(f"{name}: {sources.place(data) or 'not found, so its runs are left out'}")

    def tasks(method: Method) -> Iterator[Task]:
        yield from shard_tasks(sources, method.reads, folder, small=options.small)
        yield from study.trainings(method)
        if not options.without_test:
            yield from study.tests(method)

    return run_methods(
        study,
        methods,
        options,
        tasks=tasks,
        write_page=lambda: write_page(study, folder, options.page),
    )


if __name__ == "__main__":
    sys.exit(main())
