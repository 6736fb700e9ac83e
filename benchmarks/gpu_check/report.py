"""Write all stages as Markdown tables, one row per measurement, and as a JSON file."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from benchmarks.gpu_check.results import Row, StageResult, Value
from megavis.data.format.files import to_json, write_atomically

_MARKS = {True: "yes", False: "**NO**", None: ""}


def write_report(folder: Path, results: Sequence[StageResult]) -> Path:
    """Write `report.json` and `report.md`; return the path of the latter."""
    tree = [result.as_json() for result in results]
    write_atomically(folder / "report.json", (to_json(tree, indent=2) + "\n").encode())
    path = folder / "report.md"
    write_atomically(path, markdown(results).encode())
    return path


def markdown(results: Sequence[StageResult]) -> str:
    """Return the report: the machine, then one table per stage."""
    lines = ["# GPU check", ""]
    if any(result.small for result in results):
        lines += ["Tiny sizes: every code path has run, and no time here means anything.", ""]
    lines += _machine(results)
    for result in results:
        lines += _stage(result)
    return "\n".join(lines)


def _machine(results: Sequence[StageResult]) -> list[str]:
    """Return the facts as a table; those that differ between stages are listed with both values."""
    facts: dict[str, list[str]] = {}
    for result in results:
        for name, value in result.facts.items():
            values = facts.setdefault(name, [])
            if value not in values:
                values.append(value)
    rows = [[name, "; ".join(values)] for name, values in facts.items()]
    return [*_table(["machine", ""], rows), ""] if rows else []


def _stage(result: StageResult) -> list[str]:
    state = "finished" if result.finished else result.stopped or "unfinished"
    lines = [f"## {result.stage}. {result.title} ({state}, {result.seconds:.0f} s)", ""]
    rows = [_cells(row) for row in result.rows]
    if rows:
        lines += [*_table(["measured", "value", "aim or anchor", "as aimed", "note"], rows), ""]
    failed = {name: part.error for name, part in result.parts.items() if part.error}
    lines += [f"- {name}: {error}" for name, error in failed.items()]
    return [*lines, ""] if failed else lines


def _cells(row: Row) -> list[str]:
    unit = row.unit if row.value is not None else ""
    value = f"{text_of(row.value)} {unit}".strip()
    return [row.what, value, row.aim, _MARKS[row.passed], row.note]


def text_of(value: Value) -> str:
    """Format a value for the table."""
    if value is None:
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.4g}"
    return str(value)


def _table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    lines = [header, ["---"] * len(header), *rows]
    return [f"| {' | '.join(_escaped(cell) for cell in cells)} |" for cells in lines]


def _escaped(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")
