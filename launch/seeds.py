"""Write docs/seeds.md: mean and deviation over the seeds of each demo that has been run here.

    for seed in 0 1 2; do SEED=$seed make demo PAPER=gvp; done
    python launch/seeds.py

Every number is read from the run folders; `--runs` names their folder.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import gallery

from megavis.reports.results import EvalMetric, eval_metrics, format_value
from megavis.reports.run_record import RunRecord

Key = tuple[str, str]
"""What was measured, and which number of it."""
HEAD = """# The demos over seeds

Written by `python launch/seeds.py` from the run folders of `SEED=0 make demo PAPER=…`, `SEED=1 …`
and so on: mean ± standard deviation over the seeds, with one less than their number in the
denominator. A difference is taken seed by seed. Letters, palettes and tokenizers are those of
seed 0.
"""
DIFFERENCES: tuple[tuple[Key, Key], ...] = (
    (("linear probe", "trained"), ("linear probe", "untrained")),
    (("linear probe", "trained"), ("linear probe", "raw pixels")),
    (("in their place", "none masked"), ("in their place", "chance")),
    (("lower halves", "mean of several"), ("lower halves", "row repeated")),
)


def main(words: Sequence[str] | None = None) -> int:
    """Write the page; return 1 where no demo has been run, 2 where runs cannot be compared."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=Path, default=gallery.ROOT / "runs")
    parser.add_argument("--out", type=Path, default=gallery.DOCS / "seeds.md")
    options = parser.parse_args(words)
    try:
        sections = [*filter(None, (section(demo, options.runs) for demo in gallery.DEMOS))]
    except ValueError as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    if not sections:
        sys.stderr.write(f"{options.runs} holds no run of a demo: run `make demo`\n")
        return 1
    options.out.write_text("\n".join([HEAD, *sections]), encoding="utf-8")
    sys.stdout.write(f"{options.out}: {len(sections)} of {len(gallery.DEMOS)} demos\n")
    return 0


def section(demo: gallery.Demo, runs: Path) -> str:
    """Return a demo's section; nothing where it has not been run.

    Raises:
        ValueError: runs of one name differ in more than their seed.
    """
    tables = []
    for name in demo.runs:
        found = {seed: RunRecord.read(folder) for seed, folder in seeds_of(name, runs)}
        if found:
            check_alike(found)
            numbers = {seed: numbers_of(run) for seed, run in found.items()}
            tables.append(f"`{name}`\n\n" + "\n".join(table(numbers)) + "\n")
    if not tables:
        return ""
    return f"## {demo.title}\n\n```\nSEED=… make demo PAPER={demo.paper}\n```\n\n" + "\n".join(
        tables
    )


def seeds_of(name: str, runs: Path) -> Iterator[tuple[int, Path]]:
    """Yield the seeds of a run, and their folders: NAME is seed 0, NAME_2 is seed 2."""
    for folder in sorted(runs.glob(f"{name}*")):
        tag = folder.name.removeprefix(name)
        is_one = not tag or (tag[0] == "_" and tag[1:].isdigit())
        if is_one and (folder / "metrics.jsonl").exists():
            yield int(tag[1:] or 0), folder


def check_alike(runs: Mapping[int, RunRecord]) -> None:
    """Check that runs differ in seed and names alone.

    Raises:
        ValueError: another key differs, or the last step.
    """
    first, *others = runs.values()
    for run in others:
        for key in differing(first.config, run.config):
            if key not in ("seed", "name", "finetune.from_run"):
                raise ValueError(
                    f"{run.folder} and {first.folder} differ in {key}; seeds of one demo may not"
                )
        if run.last_step != first.last_step:
            raise ValueError(
                f"{run.folder} ends at step {run.last_step}, {first.folder} at {first.last_step}"
            )


def differing(one: Mapping[str, Any], other: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    """Yield the dotted keys in which two trees differ."""
    for key in {**one, **other}:
        here, there = one.get(key), other.get(key)
        if isinstance(here, dict) and isinstance(there, dict):
            yield from differing(here, there, f"{prefix}{key}.")
        elif here != there:
            yield prefix + key


def numbers_of(run: RunRecord) -> dict[Key, EvalMetric]:
    """Return what a run has come to, and its last validation loss."""
    found = {(each.group, each.name): each for each in eval_metrics(run.folder)}
    for first, second in DIFFERENCES:
        if first in found and second in found:
            value = found[first].value - found[second].value
            of, name = first[0], f"{first[1]} − {second[1]}"
            found[of, name] = EvalMetric(of, name, value, found[first].unit)
    losses = run.series("validation_loss")[1]
    if losses:
        found["validation loss", ""] = EvalMetric("validation loss", "", losses[-1], "")
    return found


def table(numbers: Mapping[int, Mapping[Key, EvalMetric]]) -> Iterator[str]:
    """Yield the lines of a Markdown table: a row a number, a column a seed."""
    seeds = sorted(numbers)
    yield f"| | mean ± deviation | {' | '.join(f'seed {seed}' for seed in seeds)} |"
    yield "|---" * (2 + len(seeds)) + "|"
    for key in dict.fromkeys(key for seed in seeds for key in numbers[seed]):
        each = [numbers[seed].get(key) for seed in seeds]
        cells = ["" if one is None else one.formatted for one in each]
        name = ", ".join(part for part in key if part)
        yield f"| {name} | {spread([one for one in each if one])} | {' | '.join(cells)} |"


def spread(each: Sequence[EvalMetric]) -> str:
    """Return mean ± deviation of one number over seeds; the number where there is one seed."""
    values, unit = [one.value for one in each], each[0].unit
    if len(values) == 1:
        return each[0].formatted
    digits = 1 if unit == "%" else 2
    return f"{fmean(values):.{digits}f} ± {format_value(stdev(values), unit)}"


if __name__ == "__main__":
    sys.exit(main())
