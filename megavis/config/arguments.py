"""Command-line parsing and help of `megavis` and `python -m data_tools`, and the names of runs."""

from __future__ import annotations

import argparse
import codecs
import contextlib
import faulthandler
import io
import math
import os
import re
import select
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from megavis.config.errors import UserError
from megavis.config.places import check_file, check_place

_HELP_COLUMN = 28

RUN_NAME = r"^[A-Za-z0-9][A-Za-z0-9._-]*$"
"""Pattern of the names of run folders."""
RUN_NAME_RULE = (
    "a run's name has only letters, digits, '.', '_' and '-', and begins with a letter or digit"
)


def positive(text: str) -> int:
    """Parse an integer of 1 or more; raises argparse.ArgumentTypeError."""
    return _whole_number(text, least=1)


def non_negative(text: str) -> int:
    """Parse an integer of 0 or more; raises argparse.ArgumentTypeError."""
    return _whole_number(text, least=0)


def _whole_number(text: str, *, least: int) -> int:
    if not text.isdecimal() or int(text) < least:
        raise argparse.ArgumentTypeError(f"'{text}' is not a whole number of {least} or more")
    return int(text)


def comma_separated(kind: Callable[[str], Any], what: str) -> Callable[[str], list[Any]]:
    """Return a parser of `KIND,KIND,...`; it raises argparse.ArgumentTypeError: not `what`."""

    def parse(text: str) -> list[Any]:
        try:
            return [kind(word) for word in text.split(",")]
        except ValueError:
            raise argparse.ArgumentTypeError(f"'{text}' is not {what}") from None

    return parse


def path_of(text: str) -> Path:
    """Parse a path; raises argparse.ArgumentTypeError if it is empty, or a URL.

    `Path("")` is the current folder, and an unset variable of a shell gives an empty text. `Path`
    would make one slash of the two in a URL.
    """
    if not text:
        raise argparse.ArgumentTypeError(
            "the path is empty, as from an unset variable: give a path, or . for this folder"
        )
    if re.match(r"[a-z][a-z0-9+.-]*://", text):
        raise argparse.ArgumentTypeError(f"{text} is a URL: give a local path")
    return Path(text)


def output_file(text: str) -> Path:
    """Parse the path of a file to write; folders are created when it is written.

    Raises argparse.ArgumentTypeError if it cannot be written there.
    """
    path = path_of(text)
    try:
        check_file(path)
    except UserError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return path


def output_folder(text: str) -> Path:
    """Parse the path of a folder to write files in, which is created if it does not exist.

    Raises argparse.ArgumentTypeError if nothing can be written there.
    """
    path = path_of(text)
    try:
        check_place(path / "file")
    except UserError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return path


def file_stem(text: str) -> str:
    """Parse the name of a file without folder and ending; raises argparse.ArgumentTypeError."""
    if not re.fullmatch(RUN_NAME, text):
        raise argparse.ArgumentTypeError(
            f"'{text}' is not a file name: use only letters, digits, '.', '_' and '-', and begin"
            " with a letter or digit"
        )
    return text


def accept_all_text() -> None:
    """Replace characters that the output's encoding lacks by '?', where Python would raise.

    `×` is missing from ASCII and Latin-2, and bytes of file names that are not UTF-8 from any.
    """
    for stream in (sys.stdout, sys.stderr):
        # Not for streams that a test or a notebook has substituted.
        if isinstance(stream, io.TextIOWrapper) and stream.errors != "backslashreplace":
            is_utf_8 = codecs.lookup(stream.encoding).name == "utf-8"
            keeps_bytes = stream.errors == "surrogateescape" and is_utf_8
            # This flushes the stream: a log on a full disk must not end a run.
            with contextlib.suppress(OSError):
                stream.reconfigure(errors="surrogateescape" if keeps_bytes else "replace")


def show_fatal_stacks() -> None:
    """Show the stack where a signal such as SIGBUS ends this process.

    It does so, without a word, where a memory-mapped shard is truncated under its reader.
    """
    if not faulthandler.is_enabled():
        faulthandler.enable(2)  # not `sys.stderr`, which is no file in a notebook


def close_output(error: BrokenPipeError) -> int:
    """Return the exit code for output that nobody reads any more, as behind `| head`.

    Raises the error if it is about another pipe or connection.
    """
    # poll(2) reports POLLERR for the write end of a pipe whose read end is closed.
    poll = select.poll()
    poll.register(sys.stdout, select.POLLOUT)
    if not any(event & select.POLLERR for _, event in poll.poll(0)):
        raise error
    # Python would fail again when it writes the rest at its end.
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), sys.stdout.fileno())
    # What a shell reports for a program that this signal ended; Python itself ignores the signal.
    return 128 + signal.SIGPIPE


class HelpFormatter(argparse.HelpFormatter):
    """Wraps texts, keeps the lines of examples, and shows the default of every option.

    A default is added if the help does not mention one. Flags have none, nor have options
    whose absence omits something.
    """

    _METAVARS: dict[Any, str] = {
        int: "N",
        positive: "N",
        non_negative: "N",
        float: "X",
        Path: "PATH",
        output_file: "PATH",
        output_folder: "PATH",
        file_stem: "NAME",
    }

    def __init__(self, prog: str, **options: Any) -> None:
        super().__init__(prog, max_help_position=_HELP_COLUMN, **options)
        # Align all texts in one column; argparse ignores the indentation of commands.
        self._action_max_length = _HELP_COLUMN - 2

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        if not text.startswith("example"):
            return super()._fill_text(text, width, indent)
        # Examples are copied: a wrapped line would not run.
        return "".join(f"{indent}{line}\n" for line in text.splitlines())

    def _get_help_string(self, action: argparse.Action) -> str:
        text, default = action.help or "", action.default
        has_none = default is None or isinstance(default, bool) or default == argparse.SUPPRESS
        if has_none or not action.option_strings or action.required or "default" in text:
            return text
        shown = ",".join(map(str, default)) if isinstance(default, tuple | list) else str(default)
        return f"{text}; default: {shown or 'none'}"

    def _get_default_metavar_for_optional(self, action: argparse.Action) -> str:
        return self._METAVARS.get(action.type) or super()._get_default_metavar_for_optional(action)


class ArgumentParser(argparse.ArgumentParser):
    """A parser with `HelpFormatter`, also for its commands; mistakes raise `UserError`.

    Args:
        fill: adds description and options when the parser is first used, so only the module
            of the selected command is imported.
        **options: as for `argparse.ArgumentParser`.
    """

    def __init__(
        self, *, fill: Callable[[ArgumentParser], None] | None = None, **options: Any
    ) -> None:
        super().__init__(**{"formatter_class": HelpFormatter, **options})
        self.register("type", Path, path_of)
        # Of the innermost parser: which of its options were given, and whose help shows them.
        self.set_defaults(default_of=self.get_default, refuse=self.error)
        self._fill = fill

    def fill(self) -> None:
        """Call `fill` once."""
        fill, self._fill = self._fill, None
        if fill is not None:
            fill(self)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Fill the parser and read arguments as `argparse` does."""
        self.fill()
        return super().parse_known_args(args, namespace)

    def error(self, message: str) -> NoReturn:
        """Raise UserError, where argparse would print the whole usage and exit."""
        raise UserError(f"{message}; `{self.prog} --help` shows the options")


def non_negative_number(text: str) -> float:
    """Parse a finite number of 0 or more; raises argparse.ArgumentTypeError."""
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not 0 <= number < math.inf:
        raise argparse.ArgumentTypeError(f"'{text}' is not a number of 0 or more")
    return number


def add_perceptual_arguments(parser: argparse.ArgumentParser) -> None:
    """Add options for the weight files of a perceptual distance."""
    parser.add_argument(
        "--perceptual-weights",
        metavar="FILE",
        help="VGG-16 or AlexNet weights; also measure the distance in its features",
    )
    parser.add_argument(
        "--lpips-weights",
        metavar="FILE",
        help="linear weights of the same network, from the package lpips; with"
        " --perceptual-weights, LPIPS is measured",
    )


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
        return cls(key, tuple(map(_four_digits, _log_grid(values))))


def _four_digits(value: float) -> str:
    """Write a number with four digits, and a large one as a whole number."""
    text = f"{value:.4g}"
    return f"{float(text):.0f}" if "e+" in text else text


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
