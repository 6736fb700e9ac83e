"""Keep a run alive while its log cannot be written, as on a full disk."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterable, Iterator
from typing import Any, TextIO


class _Forgiving:
    """A text stream that drops what cannot be written."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        with contextlib.suppress(OSError):
            self._stream.write(text)
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        for line in lines:
            self.write(line)

    def flush(self) -> None:
        with contextlib.suppress(OSError):
            self._stream.flush()


@contextlib.contextmanager
def forgiving_messages() -> Iterator[None]:
    """Ignore errors of standard error within the block."""
    stream: Any = _Forgiving(sys.stderr)
    with contextlib.redirect_stderr(stream):
        yield
