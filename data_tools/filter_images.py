"""`filter`: select images of a web collection, and record why others are dropped.

Images are measured once, unit by unit; the decision is fast and can be repeated with other
thresholds. Images stay in place: `--selection` of the other verbs skips the dropped ones. Images
measured while a verb wrote shards (`--measure`) are not read again.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path

from data_tools.filter_decision import LEAST_LIKE, LIKE, Thresholds, decide, read_excluded
from data_tools.jobs import add_job_arguments, is_finished, run_job
from data_tools.measurements import MAX_DISTANCE, MeasurementEncoder, RunFeatures, check_installed
from data_tools.selection import MEASURED
from data_tools.source_formats import add_source_arguments, open_source, open_unlabelled
from data_tools.sources import ImageSource, SourcePart
from data_tools.user_text import whole_number
from megavis.config.arguments import positive
from megavis.config.errors import UserError


def add_filter_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `filter` to its parser."""
    add_source_arguments(parser, selects=False)
    parser.add_argument("--min-side", type=positive, default=64, help="pixels of the shorter side")
    parser.add_argument(
        "--max-aspect", type=float, default=3.0, help="longer side divided by the shorter"
    )
    parser.add_argument(
        "--near",
        type=whole_number(0, MAX_DISTANCE),
        metavar="N",
        default=4,
        help="largest number of different bits, of 64, in perceptual hashes of near-duplicates",
    )
    parser.add_argument(
        "--keep-duplicates", action="store_true", help="do not compare images with each other"
    )
    parser.add_argument(
        "--evaluation",
        type=Path,
        action="append",
        default=[],
        metavar="SOURCE",
        help="images whose near-duplicates are dropped; may be given several times",
    )
    parser.add_argument(
        "--exclude",
        type=Path,
        metavar="FILE",
        help="one hash per line: 64 hexadecimal digits for SHA-256 of a file, 16 for phash "
        "of ImageHash",
    )
    parser.add_argument(
        "--like", type=Path, metavar="SOURCE", help="keep images similar to these (ImageNet)"
    )
    parser.add_argument(
        "--min-likeness", type=float, default=0.5, help="least probability to be one of --like"
    )
    parser.add_argument(
        "--features",
        type=Path,
        metavar="RUN",
        help="run folder of megavis: compare --like by features of its network, not by colour and "
        "texture",
    )
    parser.add_argument(
        "--like-count", type=int, default=20_000, help="images to train the classifier on"
    )
    add_job_arguments(parser)


def run_filter(arguments: argparse.Namespace) -> int:
    """Measure the images and decide. Raises UserError and OSError.

    Returns 1 if writing failed or a worker was killed; then a rerun continues.
    """
    _check(arguments)
    check_installed()
    excluded = read_excluded(arguments.exclude)
    network = RunFeatures.open(arguments.features) if arguments.features is not None else None
    source = open_source(arguments)
    sources = {MEASURED: source}
    for number, place in enumerate(arguments.evaluation):
        sources[f"evaluation-{number}"] = open_unlabelled(place)
    evaluation = [arguments.out / name for name in sources if name != MEASURED]
    if arguments.like is not None:
        sources[LIKE] = FirstParts.of(open_unlabelled(arguments.like), arguments.like_count)
    jobs = [
        (
            images,
            MeasurementEncoder(network if name in (MEASURED, LIKE) else None),
            argparse.Namespace(**{**vars(arguments), "out": arguments.out / name}),
        )
        for name, images in sources.items()
    ]
    for job in jobs:
        label = f"measuring {job[-1].out.name}"
        if failed := run_job(*job, label=label, finish=lambda *_: None):
            return failed
    # Another machine may finish a job that this one left unfinished. Two machines that decide at
    # the same time write the same bytes.
    if all(is_finished(*job) for job in jobs):
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
        raise UserError("--features needs --like, the images to compare with")
    if not arguments.max_aspect >= 1:  # not a number is not either
        raise UserError("--max-aspect must be at least 1")
    if not 0 <= arguments.min_likeness <= 1 or arguments.like_count < LEAST_LIKE:
        raise UserError(
            f"--min-likeness must lie in 0 to 1, and --like-count be at least {LEAST_LIKE}"
        )


@dataclass(frozen=True)
class FirstParts:
    """The first parts of a source, shuffled if possible: enough for `count` images.

    It has the identity of the source, since the choice of parts does not change their content.
    """

    source: ImageSource
    count: int
    description: str
    root: Path | str
    sha256: str
    class_names: tuple[str, ...]
    label_column: str

    @classmethod
    def of(cls, source: ImageSource, count: int) -> FirstParts:
        """Return the first parts of a source."""
        return cls(
            source,
            count,
            source.description,
            source.root,
            source.sha256,
            source.class_names,
            source.label_column,
        )

    def parts(self, *, files_per_part: int, seed: int) -> list[SourcePart]:
        """Return the first parts of the source; one that does not say its number counts as full."""
        size, found = min(files_per_part, self.count), 0
        parts: list[SourcePart] = []
        for part in self.source.parts(files_per_part=size, seed=seed):
            if found >= self.count:
                break
            parts.append(part)
            found += part.num_files or size
        return parts
