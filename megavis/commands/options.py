"""Options that do not apply to what a command was asked to do are refused by name."""

from __future__ import annotations

import argparse
from collections.abc import Iterable

from megavis.config.errors import UserError


def refuse_options(args: argparse.Namespace, options: Iterable[str], to: str) -> None:
    """Refuse those of the options that were given another value than their default.

    Args:
        args: what `ArgumentParser` has read.
        options: as a user writes them, `--top-k`.
        to: what they do not apply to, as the end of a sentence: `to a run of igpt`.

    Raises:
        UserError: one or several were given.
    """
    given = [option for option in options if _is_given(args, option)]
    if given:
        verb = "does" if len(given) == 1 else "do"
        raise UserError(f"{', '.join(given)} {verb} not apply {to}")


def _is_given(args: argparse.Namespace, option: str) -> bool:
    name = option.removeprefix("--").replace("-", "_")
    return bool(getattr(args, name) != args.default_of(name))
