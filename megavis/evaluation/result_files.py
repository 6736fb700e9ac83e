"""Dataclasses that write themselves to files, and read them strictly.

A file with a missing or an unknown key, or a value of another type, raises UserError with file and
key. Imports no torch.
"""

from __future__ import annotations

import contextlib
import csv
import functools
import json
from collections.abc import Iterator, Sequence
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any, ClassVar, Self

from pydantic import ConfigDict, TypeAdapter, ValidationError

from megavis.config.errors import UserError
from megavis.data.format.files import append, from_json, to_json, write_json

_KEYS = {
    "overall": "all",
    "real_images": "real images",
    **{name: name.upper() for name in ("pq", "sq", "rq", "rmse")},
    "abs_rel": "absRel",
}
"""Keys that differ from the names of their fields."""
_TAGS = ("classes", "segments", "instances")
"""Tags of the forms that an inline field may have, which pydantic reports like keys."""
INLINE = {"inline": True}
"""Metadata of a field whose keys are inlined in the enclosing object; at most one per class."""


def _key(name: str) -> str:
    return _KEYS.get(name, name)


class Form:
    """Base of dataclasses whose fields are the keys of a JSON object.

    A field with the default None has no key while it is None.
    """

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(
        extra="forbid", strict=True, alias_generator=_key
    )

    def record(self) -> dict[str, Any]:
        """Return the JSON object."""
        found: dict[str, Any] = {}
        for each in _fields(type(self)):
            value = _plain(getattr(self, each.name))
            if "inline" in each.metadata:
                found |= value
            elif value is not None or each.default is MISSING:
                found[_key(each.name)] = value
        return found

    @classmethod
    def parse(cls, content: Any, *, strict: bool = True) -> Self:
        """Invert `record`; raise ValueError with the reason for content of another form.

        `strict`: reject numbers that are written as text.
        """
        if not isinstance(content, dict):
            raise ValueError(f"it should hold JSON objects, not {str(content)[:40]!r}")
        inline = [each.name for each in _fields(cls) if "inline" in each.metadata]
        if inline:
            own = {_key(each.name) for each in _fields(cls)} - {*inline}
            inner = {key: value for key, value in content.items() if key not in own}
            content = {key: content[key] for key in content if key in own} | {inline[0]: inner}
        try:
            if strict:
                # Strict JSON, unlike strict Python, has lists for tuples.
                return cls._adapter().validate_json(json.dumps(content))
            return cls._adapter().validate_python(content, strict=False)
        except ValidationError as error:
            raise ValueError(_reason(error, inline)) from None

    @classmethod
    @functools.cache
    def _adapter(cls) -> TypeAdapter[Self]:
        return TypeAdapter(cls)


def _plain(value: Any) -> Any:
    if isinstance(value, tuple):
        return [_plain(each) for each in value]
    return value.record() if isinstance(value, Form) else value


def _fields(form: type[Any]) -> tuple[Any, ...]:
    return fields(form)


class Result(Form):
    """A JSON file with one object.

    Attributes:
        command: command that writes it, for messages.
    """

    command: ClassVar[str]

    def write(self, path: Path) -> None:
        """Write the file atomically; create its folder if needed. Raises OSError."""
        write_json(path, self.record())

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read the file. Raises UserError: it is missing, or has another form."""
        with _named(path, cls.command):
            return cls.parse(from_json(path.read_text(encoding="utf-8")))


class Row(Form):
    """A row of a CSV file, a line of a `.jsonl` file, or an item of a JSON list.

    Attributes:
        command: command that writes the file, for messages.
    """

    command: ClassVar[str]

    @classmethod
    def read(cls, path: Path) -> list[Self]:
        """Read all rows, except an unfinished last line. Raises UserError as `Result.read`."""
        with _named(path, cls.command):
            rows: list[Self] = []
            for content in _rows(path):
                try:
                    rows.append(cls.parse(content, strict=path.suffix != ".csv"))
                except ValueError as error:
                    raise ValueError(f"row {len(rows) + 1}: {error}") from None
            if not rows and path.suffix != ".jsonl":
                raise ValueError("it has no rows")
            return rows

    @classmethod
    def write(cls, path: Path, rows: Sequence[Self]) -> None:
        """Write a JSON list atomically; create its folder if needed. Raises OSError."""
        write_json(path, [row.record() for row in rows])

    def append(self, path: Path) -> None:
        """Append a line, replacing one that a kill has left unfinished. Raises OSError."""
        before = path.read_text(encoding="utf-8") if path.exists() else ""
        line = to_json(self.record()) + "\n"
        append(path, line.encode(), size=len(_finished(before).encode()))


def _rows(path: Path) -> Iterator[Any]:
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".csv":
        table = csv.DictReader(text.splitlines(), strict=True)
        yield from ({key: cell or None for key, cell in row.items()} for row in table)
    elif path.suffix == ".jsonl":
        yield from map(from_json, _finished(text).splitlines())
    else:
        content = from_json(text)
        if not isinstance(content, list):
            raise ValueError(f"it should hold a JSON list, not {str(content)[:40]!r}")
        yield from content


def _finished(text: str) -> str:
    """Return the complete lines: a kill may leave an incomplete last one."""
    return text[: text.rfind("\n") + 1]


@contextlib.contextmanager
def _named(path: Path, command: str) -> Iterator[None]:
    """Raise UserError, with file and command, for exceptions of the block."""
    try:
        yield
        return
    except OSError as error:
        reason = str(error.strerror)
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        reason = f"it is not JSON ({error})"
    except (ValueError, csv.Error) as error:
        reason = str(error)
    raise UserError(f"{path} is not a result of {command}: {reason}")


def _reason(error: ValidationError, inline: Sequence[str]) -> str:
    """Return what is wrong in half a sentence; names in `inline` are no keys of the file."""
    first = error.errors()[0]
    place = first["loc"]
    if place and place[0] in inline:
        place = place[1:]
        if len(place) > 1 and place[0] in _TAGS:
            place = place[1:]
    where = ".".join(map(str, place))
    if first["type"] == "missing":
        return f"`{where}` is missing"
    if first["type"] == "unexpected_keyword_argument":
        return f"`{where}` is unknown"
    what = first["msg"].replace("Input", f"`{where}`" if where else "its content", 1)
    return f"{what}, not {first['input']!r}"
