"""A YAML file as a tree of keys, with the location of each.

A file may be `based_on` another, which provides the keys that it lacks.
"""

from __future__ import annotations

import contextlib
import os
import re
import reprlib
import typing
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from megavis.config.errors import UserError
from megavis.config.section import ConfigIssue
from megavis.config.shorthand import RIVALS, write_out_preset

BASED_ON = "based_on"
"""Top-level key that names another file, which provides the keys that this one lacks."""


_TAG = "tag:yaml.org,2002:"
_CORE_SCHEMA = (
    ("null", r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    ("bool", r"true|True|TRUE|false|False|FALSE", list("tTfF")),
    ("int", r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+", list("-+0123456789")),
    (
        "float",
        r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)",
        list("-+.0123456789"),
    ),
    # Not a scalar of the core schema, but PyYAML's usual meaning of `<<`.
    ("merge", "<<", ["<"]),
)
"""Words that are not text, by YAML 1.2's core schema (section 10.3.2), and their first letters."""


_LONG = 200


class _Loader(yaml.SafeLoader):
    """PyYAML's safe loader with the scalars of YAML 1.2's core schema.

    PyYAML follows 1.1, in which 0042 is 34, 1:30 is 90, 1_000 is 1000, `on` is true and
    2024-01-02 a date, while 1e-3 is text.
    """

    # Empty, since `add_implicit_resolver` otherwise starts from a copy of the parent's words, YAML
    # 1.1's.
    yaml_implicit_resolvers: dict[str, Any] = {}  # noqa: RUF012 - PyYAML's own declaration


class _Dumper(yaml.SafeDumper):
    """PyYAML's safe dumper, which quotes text that YAML 1.1 or `_Loader` would not read as text."""


for _side in (_Loader, _Dumper):
    for _kind, _pattern, _first in _CORE_SCHEMA:
        _side.add_implicit_resolver(f"{_TAG}{_kind}", re.compile(f"^(?:{_pattern})$"), _first)


def _integer(loader: yaml.SafeLoader, node: yaml.ScalarNode) -> int:
    """Read an integer, in which a leading zero does not mean octal."""
    text = node.value
    base = {"0o": 8, "0x": 16}.get(text[:2], 10)
    try:
        return int(text if base == 10 else text[2:], base)
    except ValueError:  # of !!int, or thousands of digits
        problem = f"{reprlib.repr(text)} is not a readable integer"
        raise yaml.constructor.ConstructorError(None, None, problem, node.start_mark) from None


_Loader.add_constructor(f"{_TAG}int", _integer)


# Lists hold numbers: write each on one line.
_Dumper.add_representer(
    list, lambda dumper, row: dumper.represent_sequence("tag:yaml.org,2002:seq", row, True)
)


@dataclass
class ConfigSource:
    """Location of each key, for error messages."""

    path: str
    lines: dict[str, tuple[str, int]] = field(default_factory=dict)
    """File and line of each key; line 0 is the command line."""

    def place(self, key: str) -> str:
        """Return `file:line` of the key, or of the nearest section around it."""
        parts = key.split(".")
        for length in range(len(parts), 0, -1):
            path, line = self.lines.get(".".join(parts[:length]), (self.path, None))
            if line == 0:
                return "command line"
            if line is not None:
                return f"{path}:{line}"
        return self.path

    def error(self, complaints: Iterable[ConfigIssue]) -> UserError:
        """Return one error with a line per complaint."""
        return self.located(UserError.of(complaints))

    def located(self, error: UserError) -> UserError:
        """Return the error with file and line of each key that it blames."""
        return UserError.of(
            (None, text if key is None else f"{self.place(key)}: {key}: {text}")
            for key, text in error.issues
        )

    @contextlib.contextmanager
    def locate(self) -> Iterator[None]:
        """Add file and line to the keys that UserErrors of the block blame."""
        try:
            yield
        except UserError as error:
            raise self.located(error) from error


def read_tree(path: Path, source: ConfigSource, above: tuple[Path, ...] = ()) -> dict[str, Any]:
    """Read a file, with the keys of its base beneath its own."""
    tree = _read_file(path, source)
    if isinstance(tree.get("model"), dict):
        # Expand here, so a preset replaces the sizes of the base file.
        tree["model"] = write_out_preset(tree["model"])
    if BASED_ON not in tree:
        return tree
    base = tree.pop(BASED_ON)
    if not isinstance(base, str):
        raise source.error([(BASED_ON, f"must name a config file, not {reprlib.repr(base)}")])
    beneath, above = path.parent / base, (*above, path.resolve())
    if not beneath.is_file():
        # The config may have been reached by a link from another folder.
        beneath = path.resolve().parent / base
    if beneath.resolve() in above:
        raise source.error([(BASED_ON, f"{base} is based on this file in turn")])
    if not beneath.is_file():
        raise source.error([(BASED_ON, f"{beneath}: no such config file")])
    source_beneath = ConfigSource(str(beneath))
    merged = _merge(read_tree(beneath, source_beneath, above), tree)
    source.lines = {**source_beneath.lines, **source.lines}
    return merged


def _merge(beneath: dict[str, Any], above: dict[str, Any]) -> dict[str, Any]:
    """Merge section by section; `above` takes precedence.

    A section of another kind has different keys, and so replaces the one beneath.
    """
    merged = {key: value for key, value in beneath.items() if RIVALS.get(key) not in above}
    for key, value in above.items():
        old = merged.get(key)
        if isinstance(old, dict) and isinstance(value, dict) and _same_keys(key, old, value):
            value = _merge(old, value)
        merged[key] = value
    return merged


def _same_keys(section: str, old: dict[str, Any], new: dict[str, Any]) -> bool:
    """Return whether two sections are of the same kind, if the second one specifies its kind.

    Forms of a paper share keys (`givt`, `givt_maskgit`); papers do not.
    """
    if section == "objective":
        one, other = (str(name).partition("_")[0] for name in (old.get("name"), new.get("name")))
        return "name" not in new or one == other
    return new.get("kind", old.get("kind")) == old.get("kind")


def expand_home(value: Any) -> Any:
    """Return a tree with `~/` at the start of a text, a path, replaced by the home folder.

    Raises UserError if the home folder is not known.
    """
    if isinstance(value, dict):
        return {key: expand_home(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [expand_home(inner) for inner in value]
    if not (isinstance(value, str) and value.startswith("~/")):
        return value
    path = os.path.expanduser(value)
    # An empty HOME would give a path below the root.
    if path == value or os.environ.get("HOME") == "":
        raise UserError(
            f"{value}: the home folder is not known, as HOME is not set: write the path itself"
        )
    return path


def _read_file(path: Path, source: ConfigSource) -> dict[str, Any]:
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise UserError(f"{path}: no such config file") from None
    except IsADirectoryError:
        raise UserError(f"{path}: is a folder; give a YAML file in it") from None
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: cannot be read as text: {error}") from None
    try:
        tree = _parse(text, source)
    except yaml.YAMLError as error:
        # A character that YAML forbids has no line.
        marked = error if isinstance(error, yaml.MarkedYAMLError) else None
        line = f":{marked.problem_mark.line + 1}" if marked and marked.problem_mark else ""
        problem = (marked and marked.problem) or str(error).splitlines()[0]
        raise UserError(f"{path}{line}: not valid YAML: {problem}") from None
    except RecursionError:
        raise UserError(
            f"{path}: not valid YAML: keys are nested too deeply, or contain themselves"
        ) from None
    if tree is None:
        raise UserError(f"{path}: a config must be a mapping of keys, for example 'name: demo'")
    return tree


def _parse(text: str, source: ConfigSource) -> dict[str, Any] | None:
    """Return the tree, or None if the text is not a mapping; record the line of each key."""
    loader = _Loader(text)
    try:
        # Nodes, unlike the values that `yaml.load` returns, know their lines.
        node = loader.get_single_node()
        if not isinstance(node, yaml.MappingNode):
            return None
        _note_lines(node, "", source)
        return typing.cast(dict[str, Any], loader.construct_document(node))
    except UserError:
        raise
    except ValueError as error:
        # PyYAML does not catch exceptions from some tags, such as invalid dates of !!timestamp.
        raise yaml.YAMLError(str(error)) from None
    finally:
        loader.dispose()


def _note_lines(node: yaml.MappingNode, prefix: str, source: ConfigSource) -> None:
    for key_node, value_node in node.value:
        key = f"{prefix}{key_node.value}"
        line = key_node.start_mark.line + 1
        # PyYAML would silently take the last of two equal keys.
        if key in source.lines:
            raise source.error([(key, f"is given twice, also on line {line}; keep one")])
        source.lines[key] = (source.path, line)
        if isinstance(value_node, yaml.MappingNode):
            _note_lines(value_node, f"{key}.", source)
        elif isinstance(value_node, yaml.SequenceNode):
            for place, item in enumerate(value_node.value):
                if isinstance(item, yaml.MappingNode):
                    _note_lines(item, f"{key}.{place}.", source)


def apply_override(tree: dict[str, Any], word: str, source: ConfigSource) -> None:
    """Set the key of a `key=value` word.

    Raises UserError if the word has another form, its value is not YAML, or its section holds a
    value.
    """
    key, equals, text = word.partition("=")
    if not equals or not key:
        raise UserError(f"command line: '{word}' is not key=value, for example training.steps=100")
    *sections, last = key.split(".")
    place = tree
    for depth, section in enumerate(sections, start=1):
        if place.get(section) is None:
            place[section] = {}
            source.lines.setdefault(".".join(sections[:depth]), (source.path, 0))
        place = place[section]
        if not isinstance(place, dict):
            raise UserError(f"command line: {key}: '{section}' holds a value, not keys")
    try:
        place[last] = yaml.load(text, Loader=_Loader)  # noqa: S506 - a subclass of SafeLoader
    except (yaml.YAMLError, ValueError, RecursionError):
        given = text if len(text) < _LONG else reprlib.repr(text)[1:-1]
        raise UserError(f"command line: {key}: '{given}' is not a YAML value") from None
    place.pop(RIVALS.get(last, ""), None)
    if isinstance(tree.get("model"), dict):
        tree["model"] = write_out_preset(tree["model"], wins=key == "model.preset")
    for inner in [line for line in source.lines if line.startswith(f"{key}.")]:
        del source.lines[inner]  # the word replaced the whole section
    source.lines[key] = (source.path, 0)


def leaves(tree: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield each value of a tree with its dotted key."""
    for key, value in tree.items():
        if isinstance(value, dict) and value:
            yield from leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def dump_tree(tree: dict[str, Any]) -> str:
    """Return a tree as YAML that `read_tree` reads back to the same."""
    return yaml.dump(tree, Dumper=_Dumper, sort_keys=False, allow_unicode=True)
