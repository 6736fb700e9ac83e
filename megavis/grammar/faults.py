"""How a word that does not fit is reported."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple


class Fault(NamedTuple):
    """A word that does not fit.

    Attributes:
        key: of the grammar, such as `schedule.num_groups`, or of the run, such as `data.train`.
        text: what is wrong, beginning with the value; keys of the grammar stand in braces.
        remedy: choices that work.
        changes: keys of the grammar for which other values may work too; the message omits those
            that a paper fixes.
    """

    key: str
    text: str
    remedy: str
    changes: tuple[str, ...] = ()


Faults = Iterator[Fault]


def nearest_divisors(value: int, whole: int, unit: int = 1) -> str:
    """Return the next smaller and larger divisors of `whole` as words, such as "4 or 8".

    Args:
        value: not a divisor of `whole`.
        whole: 1 or more.
        unit: only its multiples count; at least one divides `whole`.
    """
    sizes = [size for size in range(unit, whole + 1, unit) if whole % size == 0]
    below, above = ([s for s in sizes if s < value], [s for s in sizes if s > value])
    return " or ".join(str(size) for size in (*below[-1:], *above[:1]))


def one_of(words: Iterable[str]) -> str:
    """Join words by commas and "or"."""
    *first, last = words
    return f"{', '.join(first)} or {last}" if first else last
