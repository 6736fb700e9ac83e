"""A YAML file as a tree of keys, with the place where each was written.

A file may be `based_on` another, whose keys hold where it has none of its own.
"""

from __future__ import annotations

import re
import reprlib
import typing
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from megavis.config.errors import UserError
from megavis.config.section import ConfigIssue
from megavis.config.shorthand import RIVALS, write_out_preset

BASED_ON = "based_on"
"""Top-level key that names another file, whose keys hold where this one has none."""


class _Loader(yaml.SafeLoader):
    """PyYAML's safe loader, with 1e-3 read as a number as YAML 1.2 has it."""


class _Dumper(yaml.SafeDumper):
    """PyYAML's safe dumper, which must quote the words that `_Loader` reads as numbers."""


for _side in (_Loader, _Dumper):
    _side.add_implicit_resolver(
        "tag:yaml.org,2002:float",
        re.compile(r"^[-+]?(\d[\d_]*)(\.[\d_]*)?[eE][-+]?\d+$"),
        list("-+0123456789"),
    )


# Lists hold numbers: one row each, however many there are.
_Dumper.add_representer(
    list, lambda dumper, row: dumper.represent_sequence("tag:yaml.org,2002:seq", row, True)
)


@dataclass
class ConfigSource:
    """Where each key was written, for messages."""

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
        """Return one error with a line for each complaint."""
        return UserError("\n".join(f"{self.place(k)}: {k}: {text}" for k, text in complaints))


def read_tree(path: Path, source: ConfigSource, above: tuple[Path, ...] = ()) -> dict[str, Any]:
    """Read a file, and beneath its keys those of the file that it is based on."""
    tree = _read_file(path, source)
    if isinstance(tree.get("model"), dict):
        # Here, so that a preset replaces the sizes of a file beneath.
        tree["model"] = write_out_preset(tree["model"])
    if BASED_ON not in tree:
        return tree
    base = tree.pop(BASED_ON)
    if not isinstance(base, str):
        raise source.error([(BASED_ON, f"names a config file, not {reprlib.repr(base)}")])
    beneath, above = path.parent / base, (*above, path.resolve())
    if beneath.resolve() in above:
        raise source.error([(BASED_ON, f"{base} is based on this file in turn")])
    if not beneath.is_file():
        raise source.error([(BASED_ON, f"{beneath}: no such config file")])
    source_beneath = ConfigSource(str(beneath))
    merged = _merge(read_tree(beneath, source_beneath, above), tree)
    source.lines = {**source_beneath.lines, **source.lines}
    return merged


def _merge(beneath: dict[str, Any], above: dict[str, Any]) -> dict[str, Any]:
    """Return both, section by section; where both have a value, that of `above`."""
    merged = {key: value for key, value in beneath.items() if RIVALS.get(key) not in above}
    for key, value in above.items():
        old = merged.get(key)
        if isinstance(old, dict) and isinstance(value, dict):
            value = _merge(old, value)
        merged[key] = value
    return merged


def _read_file(path: Path, source: ConfigSource) -> dict[str, Any]:
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise UserError(f"{path}: no such config file") from None
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: cannot be read as text: {error}") from None
    try:
        tree = _parse(text, source)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f":{mark.line + 1}" if mark else ""
        problem = getattr(error, "problem", None) or str(error).splitlines()[0]
        raise UserError(f"{path}{line}: not valid YAML: {problem}") from None
    except RecursionError:
        raise UserError(f"{path}: not valid YAML: keys lie too deep, or in themselves") from None
    if tree is None:
        raise UserError(f"{path}: a config is a mapping of keys, for example 'name: demo'")
    return tree


def _parse(text: str, source: ConfigSource) -> dict[str, Any] | None:
    """Return the tree, or None where the text is not a mapping; note the line of each key."""
    loader = _Loader(text)
    try:
        node = loader.get_single_node()
        if not isinstance(node, yaml.MappingNode):
            return None
        _note_lines(node, "", source)
        return typing.cast(dict[str, Any], loader.construct_document(node))
    except UserError:
        raise
    except ValueError as error:
        # PyYAML takes 2024-13-45 for a date and lets the calendar's own exception through.
        raise yaml.YAMLError(str(error)) from None
    finally:
        loader.dispose()


def _note_lines(node: yaml.MappingNode, prefix: str, source: ConfigSource) -> None:
    for key_node, value_node in node.value:
        key = f"{prefix}{key_node.value}"
        line = key_node.start_mark.line + 1
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

    Raises:
        UserError: the word is none, its value is no YAML, or its section holds a value.
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
        raise UserError(f"command line: {key}: '{text}' is not a YAML value") from None
    place.pop(RIVALS.get(last, ""), None)
    if isinstance(tree.get("model"), dict):
        tree["model"] = write_out_preset(tree["model"], wins=key == "model.preset")
    for inner in [line for line in source.lines if line.startswith(f"{key}.")]:
        del source.lines[inner]  # the word replaced the whole section
    source.lines[key] = (source.path, 0)


def dump_tree(tree: dict[str, Any]) -> str:
    """Return a tree as YAML that `read_tree` reads back to the same."""
    return yaml.dump(tree, Dumper=_Dumper, sort_keys=False, allow_unicode=True)
