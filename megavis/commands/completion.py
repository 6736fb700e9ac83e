"""`megavis completion`: complete commands and options in a shell."""

from __future__ import annotations

import argparse
import importlib
import sys
from importlib.util import find_spec
from typing import Any

from megavis.config.arguments import ArgumentParser
from megavis.config.errors import UserError


def run(args: argparse.Namespace) -> int:
    """Write the shell's code; needs argcomplete."""
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
