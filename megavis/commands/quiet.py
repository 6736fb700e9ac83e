"""Keep messages of imported libraries out of a command's output."""

from __future__ import annotations

import contextlib
import gc
import io
import logging
import warnings
from collections.abc import Iterator


@contextlib.contextmanager
def quietly() -> Iterator[None]:
    """Drop standard output, warnings and logs below errors inside the block; exceptions pass.

    torch logs that it finds no CUDA where a toolkit is installed without a GPU. DeepSpeed logs to
    standard output when it is imported, which would spoil `--json`, and Megatron warns of each
    optional package that is absent, which `megavis doctor` reports better. Python's garbage
    collector rests meanwhile: all that imports make stays, and looking through it again and again
    takes 15 % of the start.
    """
    collects = gc.isenabled()
    gc.disable()
    logged_from = logging.root.manager.disable
    logging.disable(max(logged_from, logging.WARNING))
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(logged_from)
        if collects:
            gc.enable()
