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
        total: number of items; 0 where nobody knows.
        unit: name of an item, in the plural.
    """

    def __init__(self, label: str, *, total: int, unit: str = "images") -> None:
        self._label, self._total, self._unit = label, total, unit
        self.done = 0
        self.errors = 0
        self._start = self._last_line = time.monotonic()
        self._bar = (
            tqdm(total=total or None, desc=label, unit=f" {unit}", leave=False, file=sys.stderr)
            if sys.stderr.isatty()
            else None
        )

    def fail(self, count: int) -> None:
        """Count `count` items as skipped; they are shown, and must be advanced as well."""
        self.errors += count
        if self._bar is not None and count:
            self._bar.set_postfix(skipped=self.errors, refresh=False)

    def advance(self, count: int = 1) -> None:
        """Count `count` more items as done."""
        self.done += count
        if self._bar is not None:
            self._bar.update(count)
        elif time.monotonic() - self._last_line > _SECONDS_BETWEEN_LINES:
            self._last_line = time.monotonic()
            sys.stderr.write(self._line())

    def _line(self) -> str:
        line = f"{self._label}: {self.done}"
        if self._total:
            line += f" of {self._total}"
        line += f" {self._unit}, {self.rate:.0f} a second"
        if self.errors:
            line += f", {self.errors} skipped"
        if self._total and self.done:
            line += f", {(self._total - self.done) / self.rate / 60:.1f} minutes left"
        return line + "\n"

    @property
    def rate(self) -> float:
        """Items a second since the start."""
        return self.done / max(time.monotonic() - self._start, 1e-9)

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
