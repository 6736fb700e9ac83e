"""One axis of a sweep: a key and its values, parsed without torch."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class SweepAxis:
    """A key and its values, as typed."""

    key: str
    values: tuple[str, ...]

    @property
    def short(self) -> str:
        """The key without its section."""
        return self.key.rpartition(".")[2]

    @classmethod
    def parse(cls, text: str) -> SweepAxis:
        """Parse `KEY=V,V,...`, or a logarithmic grid, `KEY=LOW..HIGH:COUNT`; raises ValueError."""
        key, equals, values = text.partition("=")
        if not equals or not key or not values:
            raise ValueError(f"'{text}' is not KEY=V,V,... or KEY=LOW..HIGH:COUNT")
        if ".." not in values:
            return cls(key, tuple(values.split(",")))
        return cls(key, tuple(f"{value:.4g}" for value in _log_grid(values)))


def _log_grid(text: str) -> list[float]:
    span, _, count = text.partition(":")
    low, _, high = span.partition("..")
    try:
        first, last, number = float(low), float(high), int(count)
    except ValueError:
        first = last = number = 0
    if not 0 < first < last or number < 2:
        raise ValueError(f"'{text}' is not LOW..HIGH:COUNT with 0 < LOW < HIGH and COUNT 2 or more")
    ratio = math.log(last / first) / (number - 1)
    return [first * math.exp(ratio * i) for i in range(number)]
