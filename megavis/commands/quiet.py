"""Keep what libraries print while they are imported out of a command's own output."""

from __future__ import annotations

import contextlib
import gc
import io
import warnings
from collections.abc import Iterator


@contextlib.contextmanager
def quietly() -> Iterator[None]:
    """Drop standard output and warnings inside the block; exceptions pass.

    DeepSpeed logs to standard output when it is imported, which would spoil `--json`, and Megatron
    warns of each optional package that is absent, which `megavis doctor` tells better. Python's
    garbage collector rests meanwhile: all that imports make stays, and looking through it again and
    again takes 15 % of the start.
    """
    collects = gc.isenabled()
    gc.disable()
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        if collects:
            gc.enable()
