"""What the tools tell the person at the terminal, and what they leave in a log."""

from __future__ import annotations

import sys
import time
from types import TracebackType

from tqdm import tqdm

_SECONDS_BETWEEN_LINES = 10.0


def say(text: str) -> None:
    """Write one line to standard output."""
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


class Progress:
    """A bar on a terminal, a plain line every ten seconds in a log; both on standard error.

    Args:
        label: what is being done.
        total: number of items.
        unit: name of an item, in the plural.
    """

    def __init__(self, label: str, *, total: int, unit: str = "images") -> None:
        self._label, self._total, self._unit = label, total, unit
        self._done = 0
        self._start = self._last_line = time.monotonic()
        self._bar = (
            tqdm(total=total, desc=label, unit=f" {unit}", leave=False, file=sys.stderr)
            if sys.stderr.isatty()
            else None
        )

    def advance(self, count: int = 1) -> None:
        """Count `count` more items as done."""
        self._done += count
        if self._bar is not None:
            self._bar.update(count)
        elif time.monotonic() - self._last_line > _SECONDS_BETWEEN_LINES:
            self._last_line = time.monotonic()
            sys.stderr.write(f"{self._label}: {self._done} of {self._total} {self._unit}\n")

    @property
    def rate(self) -> float:
        """Items a second since the start."""
        return self._done / max(time.monotonic() - self._start, 1e-9)

    def __enter__(self) -> Progress:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._bar is not None:
            self._bar.close()
