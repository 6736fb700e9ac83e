"""Text that users write: numbers of options, lists of names, labels and hashes, and CSV tables.

Files come from spreadsheets, from Windows and from other tools, so byte order marks are dropped,
lines may end with LF, CR LF or CR, and blank lines are ignored. Everything else that is unexpected
is an error with its line number, since a label that is read wrongly goes unnoticed.
"""

from __future__ import annotations

import argparse
import codecs
import csv
import io
from collections.abc import Callable, Sequence
from pathlib import Path

from megavis.config.errors import UserError, counted

_UTF16 = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
_MARK = "\ufeff"


def whole_number(least: int, most: int) -> Callable[[str], int]:
    """Return a parser of whole numbers in a range; it raises argparse.ArgumentTypeError."""

    def parse(text: str) -> int:
        if not text.isdecimal() or not least <= int(text) <= most:
            raise argparse.ArgumentTypeError(
                f"{text!r} is not a whole number from {least} to {most}"
            )
        return int(text)

    return parse


def read_text(path: Path) -> str:
    """Read a text file, without byte order marks and with LF at the ends of lines.

    Raises UserError if it cannot be read or is not UTF-8.
    """
    try:
        content = path.read_bytes()
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}") from None
    return text_of(content, path)


def text_of(content: bytes, path: Path) -> str:
    """Decode the content of a text file as `read_text` does; errors name `path`."""
    if content.startswith(_UTF16):
        raise UserError(f"{path} is UTF-16 text: save it as UTF-8")
    if b"\0" in content:
        raise UserError(f"{path} is not a text file")
    try:
        text = content.decode("utf-8")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise UserError(
            f"{path} line {line} is not UTF-8 text (byte 0x{content[error.start]:02x}): save the"
            " file as UTF-8"
        ) from None
    # A file joined from several has marks inside too.
    return text.replace(_MARK, "").replace("\r\n", "\n").replace("\r", "\n")


def numbered_lines(path: Path) -> list[tuple[int, str]]:
    """Return the non-blank lines of a text file, stripped, with their numbers from 1."""
    return lines_of(read_text(path))


def lines_of(text: str) -> list[tuple[int, str]]:
    """Return the non-blank lines of a text, stripped, with their numbers from 1."""
    # Not `splitlines`, which also ends lines at form feeds and Unicode separators.
    numbered = enumerate(text.split("\n"), 1)
    return [(number, stripped) for number, line in numbered if (stripped := line.strip())]


def read_lines(path: Path) -> list[str]:
    """Return the non-blank lines of a text file, stripped; raises UserError if there are none."""
    lines = [line for _, line in numbered_lines(path)]
    if not lines:
        raise UserError(f"{path} is empty")
    return lines


def read_columns(path: Path, count: int) -> list[list[str]]:
    """Split each line of a text file into `count` words; the last takes the rest of the line.

    Raises UserError if a line has fewer, or there are none.
    """
    rows = []
    for number, line in numbered_lines(path):
        rows.append(line.split(maxsplit=count - 1))
        if len(rows[-1]) < count:
            found = counted(len(rows[-1]), "word")
            raise UserError(f"{path} line {number} has {found}, not {count}: {line!r}")
    if not rows:
        raise UserError(f"{path} is empty")
    return rows


def read_names(path: Path) -> tuple[str, ...]:
    """Return the lines of a list without repeated names. Raises UserError."""
    places: dict[str, int] = {}
    for number, name in numbered_lines(path):
        if name in places:
            raise UserError(
                f"{path} line {number}: {name!r} was on line {places[name]} already; write each"
                " name once, on a line of its own"
            )
        places[name] = number
    if not places:
        raise UserError(f"{path} is empty")
    return tuple(places)


def read_table(path: Path, columns: Sequence[str]) -> list[tuple[int, dict[str, str]]]:
    """Read a CSV file with a header.

    Args:
        path: the file.
        columns: names of the columns to return; others are ignored.

    Returns:
        The number of each row's line, and its values by column.

    Raises:
        UserError: a column is missing, a row has another number of values, or there are no rows.
    """
    reader = csv.reader(io.StringIO(read_text(path)), strict=True, skipinitialspace=True)
    rows: list[tuple[int, dict[str, str]]] = []
    header: list[str] = []
    try:
        for values in reader:
            if not any(value.strip() for value in values):
                continue
            if not header:
                header = _header(path, reader.line_num, values, columns)
                continue
            if len(values) != len(header):
                found = counted(len(values), "value")
                raise UserError(
                    f"{path} line {reader.line_num} has {found}, and the header"
                    f" {counted(len(header), 'column')}: the file is truncated or damaged"
                )
            row = dict(zip(header, values, strict=True))
            rows.append((reader.line_num, {name: row[name].strip() for name in columns}))
    except csv.Error as error:
        raise UserError(
            f"{path} line {reader.line_num} is not a row of a CSV file: {error}"
        ) from None
    if not rows:
        raise UserError(f"{path} {'has a header and no other line' if header else 'is empty'}")
    return rows


def _header(path: Path, line: int, values: Sequence[str], columns: Sequence[str]) -> list[str]:
    header = [value.strip() for value in values]
    for name in columns:
        if name not in header:
            raise UserError(
                f"{path} line {line}: the header has no column {name!r}, only {', '.join(header)}"
            )
    return header
