"""From a YAML file and `key=value` words to a checked `RunConfig`.

Every complaint names the file, the line and the key, and says what would be right. All complaints
of one reading come as one `UserError`.
"""

from __future__ import annotations

import re
import reprlib
import typing
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from megavis.config.checks import check_config, check_world
from megavis.config.errors import UserError
from megavis.config.names import ObjectiveTypes, SchemaNames
from megavis.config.schema import Complaint, ObjectiveConfig, RunConfig


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
class Source:
    """Where each key was written, for messages."""

    path: str
    lines: dict[str, int] = field(default_factory=dict)

    def place(self, key: str) -> str:
        """Return `file:line` of the key, or of the nearest section around it."""
        parts = key.split(".")
        for length in range(len(parts), 0, -1):
            line = self.lines.get(".".join(parts[:length]))
            if line == 0:
                return "command line"
            if line is not None:
                return f"{self.path}:{line}"
        return self.path

    def error(self, complaints: Iterable[Complaint]) -> UserError:
        """Return one error with a line for each complaint."""
        return UserError("\n".join(f"{self.place(k)}: {k}: {text}" for k, text in complaints))


@dataclass(frozen=True)
class LoadedConfig:
    """A checked config and where its keys came from."""

    config: RunConfig
    source: Source

    def require_world(self, world_size: int) -> None:
        """Raise `UserError` where the config does not fit `world_size` processes."""
        complaints = list(check_world(self.config, world_size))
        if complaints:
            raise self.source.error(complaints)


def load_config(
    path: str | Path, overrides: Sequence[str] = (), *, objectives: ObjectiveTypes
) -> LoadedConfig:
    """Read a YAML file, apply `key=value` words, check everything.

    Args:
        path: the YAML file.
        overrides: words such as `training.steps=100`; the value is read as YAML.
        objectives: config class of each paper by name.

    Raises:
        UserError: with file, line, key and what would be right for every mistake.
    """
    source = Source(str(path))
    tree = _read_tree(Path(path), source)
    for word in overrides:
        _apply_override(tree, word, source)
    config = _validate(tree, source, objectives)
    complaints = list(check_config(config))
    if complaints:
        raise source.error(complaints)
    return LoadedConfig(config, source)


def _validate(tree: dict[str, Any], source: Source, objectives: ObjectiveTypes) -> RunConfig:
    names = SchemaNames(objectives, tree)
    if names.objective is None:
        given = f", not {reprlib.repr(names.paper)}" if names.paper is not None else ""
        known = ", ".join(sorted(objectives))
        raise source.error([("objective.name", f"must say which paper: one of {known}{given}")])
    complaints: list[Complaint] = []
    # The objective comes first, with its paper's class, so that its errors keep their keys.
    try:
        tree["objective"] = names.objective.model_validate(tree["objective"])
    except ValidationError as error:
        complaints += names.explain(error.errors(), ["objective"])
        tree["objective"] = ObjectiveConfig(name="")
    try:
        config = RunConfig.model_validate(tree)
    except ValidationError as error:
        complaints += names.explain(error.errors())
    if complaints:
        raise source.error(complaints)
    return config


def dump_config(config: RunConfig) -> str:
    """Return the resolved config as YAML that `load_config` reads back to the same config."""
    tree = config.model_dump(mode="json")
    return yaml.dump(tree, Dumper=_Dumper, sort_keys=False, allow_unicode=True)


def _read_tree(path: Path, source: Source) -> dict[str, Any]:
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


def _parse(text: str, source: Source) -> dict[str, Any] | None:
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


def _note_lines(node: yaml.MappingNode, prefix: str, source: Source) -> None:
    for key_node, value_node in node.value:
        key = f"{prefix}{key_node.value}"
        line = key_node.start_mark.line + 1
        if key in source.lines:
            raise source.error([(key, f"is given twice, also on line {line}; keep one")])
        source.lines[key] = line
        if isinstance(value_node, yaml.MappingNode):
            _note_lines(value_node, f"{key}.", source)
        elif isinstance(value_node, yaml.SequenceNode):
            for place, item in enumerate(value_node.value):
                if isinstance(item, yaml.MappingNode):
                    _note_lines(item, f"{key}.{place}.", source)


def _apply_override(tree: dict[str, Any], word: str, source: Source) -> None:
    key, equals, text = word.partition("=")
    if not equals or not key:
        raise UserError(f"command line: '{word}' is not key=value, for example training.steps=100")
    *sections, last = key.split(".")
    place = tree
    for depth, section in enumerate(sections, start=1):
        if place.get(section) is None:
            place[section] = {}
            source.lines.setdefault(".".join(sections[:depth]), 0)
        place = place[section]
        if not isinstance(place, dict):
            raise UserError(f"command line: {key}: '{section}' holds a value, not keys")
    try:
        place[last] = yaml.load(text, Loader=_Loader)  # noqa: S506 - a subclass of SafeLoader
    except (yaml.YAMLError, ValueError, RecursionError):
        raise UserError(f"command line: {key}: '{text}' is not a YAML value") from None
    for inner in [line for line in source.lines if line.startswith(f"{key}.")]:
        del source.lines[inner]  # the word replaced the whole section
    source.lines[key] = 0


def json_schema(objectives: ObjectiveTypes) -> dict[str, Any]:
    """Return the JSON schema of a config file, for editors."""
    schema = RunConfig.model_json_schema()
    # Each paper's own section takes the place of what all of them share.
    del schema["$defs"][ObjectiveConfig.__name__]
    papers = []
    for name, paper in sorted(objectives.items()):
        section = paper.model_json_schema(ref_template="#/$defs/{model}")
        schema["$defs"].update(section.pop("$defs", {}))
        section["properties"]["name"] = {"const": name, "type": "string"}
        section["required"] = ["name", *section.get("required", [])]
        schema["$defs"][paper.__name__] = section
        papers.append({"$ref": f"#/$defs/{paper.__name__}"})
    schema["properties"]["objective"] = {"oneOf": papers, "description": "The paper's own keys."}
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema}
