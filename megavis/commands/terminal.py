"""Terminal of a command: its verbosity besides the results, and completion of what is typed.

The environment stores the verbosity, so that all processes of a job and subprocesses share it.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import importlib
import io
import logging
import os
import sys
import warnings
from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any

from megavis.config.arguments import ArgumentParser
from megavis.config.errors import UserError

_VERBOSE = "MEGAVIS_VERBOSE"


def set_verbosity(*, quiet: bool, verbose: bool) -> None:
    """Set the verbosity. Raises UserError if both are given."""
    if quiet and verbose:
        raise UserError("--quiet and --verbose exclude each other; keep one")
    if quiet:
        # tqdm reads it when it is imported.
        os.environ["TQDM_DISABLE"] = "1"
        os.environ["PYTHONWARNINGS"] = "ignore"
        warnings.simplefilter("ignore")
        logging.disable(logging.WARNING)
    if verbose:
        os.environ[_VERBOSE] = "1"
        logging.basicConfig(level=logging.INFO)


def is_verbose() -> bool:
    """Return whether the output of libraries is shown."""
    return _VERBOSE in os.environ


@contextlib.contextmanager
def quietly() -> Iterator[None]:
    """Drop standard output, warnings and logs below errors within the block; exceptions pass.

    torch logs missing CUDA if a toolkit is installed without a GPU. DeepSpeed logs to standard
    output on import, which would corrupt `--json`, and Megatron warns about each missing optional
    package, which `megavis doctor` reports better. Python's garbage collector is paused: objects
    created by imports stay alive, and scanning them repeatedly takes 15 % of start-up.
    """
    if is_verbose():
        yield
        return
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


def write_completion(args: argparse.Namespace) -> int:
    """`megavis completion`: write the shell's code; needs argcomplete."""
    if find_spec("argcomplete") is None:
        raise UserError("completion needs argcomplete: pip install 'megavis[completion]'")
    sys.stdout.write(_argcomplete().shellcode(["megavis"], shell=args.shell))
    return 0


def complete(parser: argparse.ArgumentParser) -> None:
    """Write completions and exit if a shell asks for them; needs argcomplete, else do nothing."""
    if find_spec("argcomplete") is not None:
        _fill(parser)
        _argcomplete().autocomplete(parser)


def _fill(parser: argparse.ArgumentParser) -> None:
    """Fill a parser and its subparsers: argcomplete reads only what exists when it starts."""
    if isinstance(parser, ArgumentParser):
        parser.fill()
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for each in action.choices.values():
                _fill(each)


def _argcomplete() -> Any:
    return importlib.import_module("argcomplete")
