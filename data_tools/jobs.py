"""Options, execution, report and manifest shared by all verbs that write shards.

A verb provides a source and an encoder. The manifest of a folder is written last, so a folder that
has one is finished.
"""

from __future__ import annotations

import argparse
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

from data_tools import __version__
from data_tools.engines import ENGINES, Failure, process_map, run_units
from data_tools.job_report import JobOutcome, ProgressBar, say, write_memory_figure, write_report
from data_tools.out_lock import JobSlice, hold_out
from data_tools.shard_tasks import ShardEncoder, Unit, UnitResult, plan_units, refuse_other_jobs
from data_tools.sources import ImageSource
from data_tools.stored_out import (
    any_folder,
    local_folder,
    local_out,
    names_in,
    place,
    refuse_nested,
    remove_reports,
    upload_rest,
)
from data_tools.understood import unread_lines
from megavis.config.arguments import non_negative, positive
from megavis.config.errors import UserError, counted, describe_os_error
from megavis.data.format.manifest import FORMAT_VERSION, Manifest, SourceIdentity
from megavis.data.format.sample_index import finish_folder
from megavis.data.format.shards import index_path

REPORT_NAME = "report.json"
MEMORY_NAME = "memory.png"
Finish = Callable[[ImageSource, ShardEncoder, list[UnitResult], argparse.Namespace], None]
# The index of a few shards is written before worker processes have started.
_FEW_SHARDS = 100
_PARTIAL = re.compile(r"^\.(.+)\.partial-")
_AGAIN = "Finished shards are kept: run the same command again, perhaps with fewer --workers"


def add_job_arguments(
    parser: argparse.ArgumentParser, *, shuffles: bool = True, stores: bool = False
) -> None:
    """Add the options for writing shards, with `--seed` if the source is shuffled.

    With `stores`, `--out` may be a URL, which `run_job` takes.
    """
    where, out = ("folder", local_folder) if not stores else ("folder or s3:// URL", any_folder)
    parser.add_argument("--out", type=out, required=True, help=f"the {where} to write")
    parser.add_argument(
        "--samples-per-shard", type=positive, default=10_000, help="source files per shard"
    )
    if shuffles:
        parser.add_argument("--seed", type=non_negative, default=0, help="seed of the shuffle")
    else:
        parser.set_defaults(seed=0)
    add_workers_argument(parser)
    parser.add_argument("--engine", choices=ENGINES, default="local", help="where workers run")
    parser.add_argument(
        "--slice",
        type=JobSlice.parse,
        default=JobSlice(),
        metavar="I/N",
        help="write every N-th shard from the I-th; the last of N machines finishes the folder",
    )


def add_workers_argument(parser: argparse.ArgumentParser) -> None:
    """Add the option for the number of worker processes."""
    parser.add_argument(
        "--workers", type=non_negative, default=0, help="worker processes; 0 for none"
    )


def run_job(
    source: ImageSource,
    encoder: ShardEncoder,
    arguments: argparse.Namespace,
    *,
    label: str,
    finish: Finish | None = None,
) -> int:
    """Write the shards of a source: the `run` function of a verb.

    Args:
        source: the images.
        encoder: converts images to payloads.
        arguments: with the options of `add_job_arguments`.
        label: name of the work, for the progress bar.
        finish: called when all shards exist; by default, each folder gets its manifest.

    Returns:
        0, or 1 if writing failed or a worker was killed; then a rerun continues.

    Raises:
        UserError: a folder has other shards, another command writes to it, or there are no images.
    """
    refuse_nested(source.root, arguments.out)
    with ExitStack() as held:
        arguments = held.enter_context(local_out(arguments))
        units = _plan(source, encoder, arguments)
        elsewhere = (Path(each) for each in encoder.folders if Path(each).is_absolute())
        for folder in (arguments.out, *elsewhere):
            held.enter_context(hold_out(folder, arguments.slice))
        return _write_shards(source, encoder, arguments, units, label=label, finish=finish)


def _write_shards(
    source: ImageSource,
    encoder: ShardEncoder,
    arguments: argparse.Namespace,
    units: list[Unit],
    *,
    label: str,
    finish: Finish | None,
) -> int:
    part: JobSlice = arguments.slice
    mine = units[part.number - 1 :: part.count]
    alone = len(mine) == len(units)
    _remove_partials(mine, alone=alone)
    outcome = _run(mine, arguments, label=label)
    if outcome.failure is not None:
        return _tell_failure(outcome, mine, _report_path(arguments, alone=alone), arguments)
    # Once more: a worker of a killed parent may have started a file after this run started.
    _remove_partials(mine, alone=alone)
    if not alone:
        write_report(_report_path(arguments, alone=False), outcome)
        if len(_finished(units)) < len(units):
            say(f"slice {part} is done; the folder is finished when all slices are")
            return 0
        outcome = _run(units, arguments, label="reading what is there")
    names = write_report(_report_path(arguments, alone=True), outcome)
    skipped = _skipped(outcome.results)
    write_memory_figure(arguments.out / MEMORY_NAME, outcome)
    for partial_report in arguments.out.glob("report-slice-*.json"):
        partial_report.unlink(missing_ok=True)
    remove_reports(arguments)
    for line in unread_lines((result.unread for result in outcome.results), source.class_names):
        say(f"  {line}")
    unlabelled = sum(result.unlabelled for result in outcome.results)
    if unlabelled and source.class_names:
        say(f"  {counted(unlabelled, 'sample')} without a label")
    if not any(any(result.shards) for result in outcome.results):
        upload_rest(arguments, ())
        raise UserError(_none_valid(source.root, skipped, place(arguments, REPORT_NAME)))
    (finish or _write_manifests)(source, encoder, outcome.results, arguments)
    upload_rest(arguments, encoder.folders)
    for reason, count in skipped.items():
        say(f"  skipped, {reason}: {count} (the first: {names[reason][0]})")
    return 0


def _skipped(results: Iterable[UnitResult]) -> dict[str, int]:
    """Return the number of rejected files by reason."""
    total: Counter[str] = Counter()
    for result in results:
        total.update(result.skipped)
    return dict(sorted(total.items()))


def is_finished(source: ImageSource, encoder: ShardEncoder, arguments: argparse.Namespace) -> bool:
    """Return whether all slices of a job in a local folder are finished; as for `run_job`."""
    units = _units(source, encoder, argparse.Namespace(**{**vars(arguments), "url": ""}))
    return len(_finished(units)) == len(units)


def _plan(source: ImageSource, encoder: ShardEncoder, arguments: argparse.Namespace) -> list[Unit]:
    out: Path = arguments.out
    units = _units(source, encoder, arguments)
    refuse_other_jobs(units)
    for folder in encoder.folders:
        (out / folder).mkdir(parents=True, exist_ok=True)
        encoder.prepare(out / folder)
    return units


def _units(source: ImageSource, encoder: ShardEncoder, arguments: argparse.Namespace) -> list[Unit]:
    return plan_units(
        source,
        encoder,
        out=arguments.out,
        url=arguments.url,
        files_per_shard=arguments.samples_per_shard,
        seed=arguments.seed,
    )


def _none_valid(root: Path | str, skipped: Mapping[str, int], report: str) -> str:
    """Return an error that no file could be used, with the most frequent reason."""
    text = f"no file of {root} is a valid image"
    if not skipped:
        return f"{text}; for reasons, see {report}"
    reason, count = max(skipped.items(), key=lambda each: each[1])
    return f"{text}: {reason} ({count} of {sum(skipped.values())} files; see {report})"


def _report_path(arguments: argparse.Namespace, *, alone: bool) -> Path:
    if alone:
        return arguments.out / REPORT_NAME
    return arguments.out / f"report-slice-{str(arguments.slice).replace('/', '-of-')}.json"


def _finished(units: Sequence[Unit]) -> list[Unit]:
    """Return the units that any machine has finished. Raises OSError if a store does not answer."""
    found = [
        None if store is None else names_in(store) for unit in units[:1] for store in unit.stores
    ]
    return [
        unit
        for unit in units
        if all(
            index_path(path).exists() if names is None else index_path(path).name in names
            for path, names in zip(unit.paths, found, strict=True)
        )
    ]


def _tell_failure(
    outcome: JobOutcome, units: Iterable[Unit], path: Path, arguments: argparse.Namespace
) -> int:
    """Report the shards that a job could not write, and the existing ones."""
    assert outcome.failure is not None
    finished = [
        unit.shard for unit in units if all(index_path(path).exists() for path in unit.paths)
    ]
    report = place(arguments, path.name)
    try:
        write_report(path, outcome, finished=finished)
        upload_rest(arguments, ())
        where = f"{report} names the shards"
    except (OSError, UserError) as error:  # the disk may be full, the store out of reach
        reason = describe_os_error(error) if isinstance(error, OSError) else str(error)
        where = f"{report} cannot be written either: {reason}"
    say(f"not finished: {outcome.failure.reason}; {where}. {_AGAIN}")
    return 1


def _remove_partials(units: Iterable[Unit], *, alone: bool) -> None:
    """Remove partial files of these units, but none that another slice may be writing."""
    directories: dict[Path, set[str]] = defaultdict(set)
    for unit in units:
        for path in unit.paths:
            directories[path.parent] |= {path.name, index_path(path).name}
    for directory, names in directories.items():
        for partial in directory.iterdir():
            match = _PARTIAL.match(partial.name)
            if match and (alone or match[1] in names):
                partial.unlink(missing_ok=True)


def _run(units: Sequence[Unit], arguments: argparse.Namespace, *, label: str) -> JobOutcome:
    """Run the units, up to the first failure."""
    outcome = JobOutcome()
    total = sum(unit.part.num_files for unit in units)
    with ProgressBar(label, total=total) as progress:
        for result in run_units(
            units, workers=arguments.workers, engine=arguments.engine, advance=progress.advance
        ):
            if isinstance(result, Failure):
                outcome.failure = result
                break
            progress.fail(sum(result.skipped.values()))
            outcome.results.append(result)
    outcome.seconds = progress.seconds
    there = sum(result.was_there for result in outcome.results)
    if there:
        verb = "was" if there == 1 else "were"
        say(f"{there} of {counted(len(units), 'shard')} {verb} there already")
    if there < len(units):
        made = progress.done - sum(each.num_files for each in outcome.results if each.was_there)
        rate, memory = made / max(progress.seconds, 1e-9), outcome.peak_memory / 2**20
        say(f"{counted(made, 'image')} at {rate:.0f} images/s, {memory:.0f} MiB per process")
    return outcome


def _write_manifests(
    source: ImageSource,
    encoder: ShardEncoder,
    results: list[UnitResult],
    arguments: argparse.Namespace,
) -> None:
    for number, folder in enumerate(encoder.folders):
        if not encoder.has_manifest(folder):
            continue
        manifest = manifest_of(source, encoder, results, number=number, seed=arguments.seed)
        name = place(arguments, folder).rstrip("/")
        write_manifest(manifest, arguments.out / folder, workers=arguments.workers, name=name)


def write_manifest(
    manifest: Manifest, directory: Path, *, workers: int, name: str | None = None
) -> None:
    """Write index and manifest, which finishes a shard folder. Raises OSError.

    Args:
        name: name of the folder in the message; default: its path.
    """
    with process_map(workers if len(manifest.shards) > _FEW_SHARDS else 0) as each:
        finish_folder(directory, manifest, each)
    say(f"{name or directory}: {manifest.size}")


def manifest_of(
    source: ImageSource,
    encoder: ShardEncoder,
    results: Sequence[UnitResult],
    *,
    number: int,
    seed: int,
) -> Manifest:
    """Return the manifest of the `number`-th folder of an encoder, from all its results."""
    shards = [entry for result in results if (entry := result.shards[number]) is not None]
    skipped = _skipped(results)
    return Manifest(
        format_version=FORMAT_VERSION,
        class_names=source.class_names,
        shards=tuple(sorted(shards, key=lambda entry: entry.name)),
        skipped=skipped,
        seed=seed,
        source=SourceIdentity(
            description=source.description,
            num_files=sum(result.num_files for result in results),
            sha256=source.sha256,
        ),
        tool_version=__version__,
        **encoder.describe(encoder.folders[number]),
    )
