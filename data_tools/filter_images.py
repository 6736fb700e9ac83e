"""`filter`: which images of a web collection are kept, and why the others are not.

Pictures are measured once, unit by unit; deciding takes a moment and is repeated for other
thresholds. The pictures stay where they are: `--selection` of the other verbs leaves out what is
written down here.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path

from data_tools.filter_decision import LIKE, MEASURED, Thresholds, decide
from data_tools.jobs import add_job_arguments, run_job
from data_tools.measurements import MeasurementEncoder, check_installed
from data_tools.near_duplicates import MAX_DISTANCE
from data_tools.opt_outs import read_excluded
from data_tools.run_features import RunFeatures
from data_tools.source_formats import add_source_arguments, open_source, open_unlabelled
from data_tools.sources import ImageSource, SourcePart
from megavis.config.errors import UserError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `filter` to its parser."""
    add_source_arguments(parser, selects=False)
    parser.add_argument("--min-side", type=int, default=64, help="pixels of the shorter side")
    parser.add_argument(
        "--max-aspect", type=float, default=3.0, help="longer side divided by the shorter"
    )
    parser.add_argument(
        "--near",
        type=int,
        default=4,
        help="perceptual hashes that differ in at most so many of 64 bits are near-duplicates",
    )
    parser.add_argument(
        "--keep-duplicates", action="store_true", help="do not compare pictures with one another"
    )
    parser.add_argument(
        "--evaluation",
        type=Path,
        action="append",
        default=[],
        metavar="SOURCE",
        help="pictures whose near-duplicates are dropped; may be given several times",
    )
    parser.add_argument(
        "--exclude",
        type=Path,
        metavar="FILE",
        help="a hash a line: 64 hexadecimal digits: SHA-256 of a file; 16: perceptual hash (phash "
        "of ImageHash)",
    )
    parser.add_argument(
        "--like", type=Path, metavar="SOURCE", help="keep what is like these pictures (ImageNet)"
    )
    parser.add_argument(
        "--min-likeness", type=float, default=0.5, help="probability to be one of --like"
    )
    parser.add_argument(
        "--features",
        type=Path,
        metavar="RUN",
        help="run folder of megavis: --like goes by the middle of its network, not by colour and "
        "texture",
    )
    parser.add_argument(
        "--like-count", type=int, default=20_000, help="pictures to train the classifier on"
    )
    add_job_arguments(parser)


def run(arguments: argparse.Namespace) -> int:
    """Measure, decide, write down. Raises UserError and OSError.

    Returns:
        0, or 1 where the disk failed or a worker was killed: a rerun continues.
    """
    _check(arguments)
    check_installed()
    excluded = read_excluded(arguments.exclude)
    network = RunFeatures.open(arguments.features) if arguments.features is not None else None
    source = open_source(arguments)
    jobs = {MEASURED: source}
    for number, place in enumerate(arguments.evaluation):
        jobs[f"evaluation-{number}"] = open_unlabelled(place)
    evaluation = [arguments.out / name for name in jobs if name != MEASURED]
    if arguments.like is not None:
        jobs[LIKE] = FirstParts(open_unlabelled(arguments.like), arguments.like_count)
    finished: list[ImageSource] = []
    for name, job in jobs.items():
        failed = run_job(
            job,
            MeasurementEncoder(network if name in (MEASURED, LIKE) else None),
            argparse.Namespace(**{**vars(arguments), "out": arguments.out / name}),
            label=f"measuring {name}",
            finish=lambda done, *_: finished.append(done),
        )
        if failed:
            return failed
    if len(finished) == len(jobs):  # all slices are done
        decide(
            arguments.out,
            source,
            thresholds=_thresholds(arguments),
            excluded=excluded,
            evaluation=evaluation,
        )
    return 0


def _thresholds(arguments: argparse.Namespace) -> Thresholds:
    return Thresholds(
        min_side=arguments.min_side,
        max_aspect=arguments.max_aspect,
        near=arguments.near,
        keep_duplicates=arguments.keep_duplicates,
        min_likeness=arguments.min_likeness if arguments.like is not None else None,
        like_count=arguments.like_count,
    )


def _check(arguments: argparse.Namespace) -> None:
    if arguments.features is not None and arguments.like is None:
        raise UserError("--features needs --like: the pictures that others are to resemble")
    if arguments.min_side < 1 or arguments.max_aspect < 1:
        raise UserError("--min-side and --max-aspect must be at least 1")
    if not 0 <= arguments.near <= MAX_DISTANCE:
        raise UserError(f"--near must lie in 0 to {MAX_DISTANCE}")
    if not 0 <= arguments.min_likeness <= 1 or arguments.like_count < 2 * 5:
        raise UserError("--min-likeness must lie in 0 to 1, and --like-count be at least 10")


@dataclass(frozen=True)
class FirstParts:
    """The first parts of a source, shuffled where it can be: enough for `count` pictures."""

    source: ImageSource
    count: int

    @property
    def description(self) -> str:
        """That of the source."""
        return self.source.description

    @property
    def class_names(self) -> tuple[str, ...]:
        """Those of the source."""
        return self.source.class_names

    @property
    def sha256(self) -> str:
        """Identity of the source; which parts are taken does not change what each one is."""
        return self.source.sha256

    @property
    def root(self) -> Path:
        """Path of the source."""
        return self.source.root

    def parts(self, *, files_per_part: int, seed: int) -> list[SourcePart]:
        """Return the first parts of the source."""
        size = min(files_per_part, self.count)
        return self.source.parts(files_per_part=size, seed=seed)[: -(-self.count // size)]
