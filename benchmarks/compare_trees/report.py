"""Find and describe differences between two records."""

from __future__ import annotations

import fnmatch
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.compare_trees.records import SECONDS


@dataclass(frozen=True)
class Difference:
    """A measurement that differs, with a description."""

    name: str
    text: str


@dataclass(frozen=True)
class Allowed:
    """Expected differences: a pattern of names, and the reason."""

    pattern: str
    reason: str

    def covers(self, difference: Difference) -> bool:
        """Return whether the pattern matches the difference."""
        return fnmatch.fnmatchcase(difference.name, self.pattern)


def read_allowed(path: Path) -> list[Allowed]:
    """Read a file of lines `PATTERN # REASON`.

    Raises:
        ValueError: a line has no reason.
    """
    allowed = []
    for line in path.read_text(encoding="utf-8").splitlines():
        if not line.strip() or line.startswith("#"):
            continue
        pattern, _, reason = line.partition(" # ")
        if not reason.strip():
            raise ValueError(f"{path}: '{line}' has no reason; write PATTERN # REASON")
        allowed.append(Allowed(pattern.strip(), reason.strip()))
    return allowed


def differences(case: str, old: Mapping[str, Any], new: Mapping[str, Any]) -> list[Difference]:
    """Return all measurements of a case that are not bitwise equal, except times."""
    names = [name for name in {**old, **new} if not name.startswith(SECONDS)]
    found = []
    for name in names:
        if name not in old or name not in new:
            text = f"is measured in the {'new' if name in new else 'old'} tree alone"
        else:
            text = _difference(old[name], new[name])
        if text:
            found.append(Difference(f"{case}/{name}", text))
    return found


def ratios(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, float]:
    """Return the ratios of times, new / old, by name."""
    return {
        name.removeprefix(SECONDS): new[name] / old[name]
        for name in old
        if name.startswith(SECONDS) and name in new and old[name] > 0
    }


def _difference(old: Any, new: Any) -> str:
    if isinstance(old, np.ndarray) and isinstance(new, np.ndarray):
        return _of_arrays(old, new)
    if isinstance(old, np.ndarray) or isinstance(new, np.ndarray):
        return f"{type(old).__name__} became {type(new).__name__}"
    found = list(_of_trees("", _parsed(old), _parsed(new)))
    if not found:
        return ""
    more = f"; {len(found) - 1} more" if len(found) > 1 else ""
    return found[0] + more


def _parsed(value: Any) -> Any:
    """Parse texts that are JSON, so that differences are reported by key."""
    if isinstance(value, list):
        return [_parsed(each) for each in value]
    if isinstance(value, str) and value.startswith(("{", "[")):
        try:
            return {"of JSON": json.loads(value), "text": value}
        except ValueError:
            return value
    return value


def _of_arrays(old: np.ndarray, new: np.ndarray) -> str:
    if (old.dtype, old.shape) != (new.dtype, new.shape):
        return f"{old.dtype} {list(old.shape)} became {new.dtype} {list(new.shape)}"
    if old.tobytes() == new.tobytes():
        return ""
    unlike = _bits(old) != _bits(new)
    place = tuple(int(i) for i in np.argwhere(unlike)[0])
    before, after = old.astype(np.float64), new.astype(np.float64)
    gap = float(np.nanmax(np.abs(before - after)))
    scale = float(np.nanmax(np.abs(before))) or 1.0
    return (
        f"{int(unlike.sum())} of {old.size} numbers, by at most {gap:.3g} ({gap / scale:.1e} of the"
        f" largest); first at {list(place)}: {old[place]} became {new[place]}"
    )


def _bits(values: np.ndarray) -> np.ndarray:
    """Reinterpret as integers, so that NaN equals itself, and 0 and -0 differ."""
    contiguous = np.ascontiguousarray(values)
    return contiguous.view(f"u{values.dtype.itemsize}").reshape(values.shape)


def _of_trees(place: str, old: Any, new: Any) -> Iterator[str]:
    if isinstance(old, dict) and isinstance(new, dict):
        # Order matters: that of parameters determines the optimizer's states.
        if list(old) != list(new) and set(old) == set(new):
            yield f"{place or 'keys'}: another order"
        for key in {**old, **new}:
            inner = f"{place}.{key}" if place else str(key)
            if key not in old or key not in new:
                yield f"{inner} is in the {'new' if key in new else 'old'} tree alone"
            else:
                yield from _of_trees(inner, old[key], new[key])
    elif isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        for i, (mine, yours) in enumerate(zip(old, new, strict=True)):
            yield from _of_trees(f"{place}[{i}]", mine, yours)
    elif isinstance(old, str) and isinstance(new, str):
        yield from _of_texts(place, old, new)
    elif json.dumps(old) != json.dumps(new):
        yield f"{place}: {_short(old)} became {_short(new)}{_relative(old, new)}"


def _of_texts(place: str, old: str, new: str) -> Iterator[str]:
    if old == new:
        return
    before, after = old.splitlines(), new.splitlines()
    if before == after:
        yield f"{place} another line end"
        return
    pairs = zip_longest(before, after, fillvalue="(its end)")
    number, lines = next((i, pair) for i, pair in enumerate(pairs, start=1) if pair[0] != pair[1])
    yield f"{place} line {number}: '{_short(lines[0])}' became '{_short(lines[1])}'"


def _relative(old: Any, new: Any) -> str:
    if isinstance(old, float) and isinstance(new, float) and old:
        return f" ({abs(new - old) / abs(old):.1e} of it)"
    return ""


def _short(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value)
    return text if len(text) <= 300 else f"{text[:300]}..."


def lines_of(found: Sequence[Difference], allowed: Sequence[Allowed]) -> tuple[list[str], int]:
    """Return a line for each difference, and the number that are not allowed."""
    lines, wrong = [], 0
    for difference in found:
        reason = next((each.reason for each in allowed if each.covers(difference)), None)
        wrong += reason is None
        verdict = "DIFFERS" if reason is None else f"allowed ({reason})"
        lines.append(f"  {verdict}  {difference.name}: {difference.text}")
    return lines, wrong
