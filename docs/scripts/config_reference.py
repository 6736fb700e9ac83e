"""Generate the reference of all config keys, as pages of the site, from the schema.

For each key it lists type and range, default, meaning, and the line of code that declares it. Keys
of sections are on one page; the keys of `objective` are on a page per paper.
"""

from __future__ import annotations

import ast
import functools
import inspect
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from megavis.commands.config import json_schema
from megavis.config.papers import PAPER_CONFIGS
from megavis.config.schema import RunConfig
from megavis.config.section import Section
from megavis.config.yaml_tree import BASED_ON

ROOT = Path(__file__).parents[2]
HEAD = """# Config keys

A config is a YAML file of the sections below. Each key can be given on the command line too, as
`section.key=value`. `megavis config show CONFIG` lists the values of a config and the line that
each comes from. Unknown keys are errors. A key without a default is required, in the file or in a
file that it is `based_on`.

The section `objective` has the keys of a paper: {papers}.

This page is generated from `megavis schema`. The last column is the line that declares the key.
"""
TABLE = "| key | type | default | meaning | declared in |\n|---|---|---|---|---|"
RANGES = {"minimum": "≥", "exclusiveMinimum": ">", "maximum": "≤", "exclusiveMaximum": "<"}


def config_pages() -> Iterator[tuple[str, str]]:
    """Yield the path in the site and the text of each page."""
    schema = json_schema()
    definitions = schema["$defs"]
    schema["properties"][BASED_ON]["default"] = None
    for entry in schema["properties"].values():
        for reference in _references(entry)[:1]:
            entry.setdefault("description", definitions[reference]["description"])
    papers = {name: type_.__module__.split(".")[2] for name, type_ in PAPER_CONFIGS.items()}
    folders = sorted(set(papers.values()))
    links = ", ".join(f"[{folder}]({folder}.md)" for folder in folders)
    parts = [HEAD.format(papers=links), "## Outside sections", "", _table(schema, RunConfig, "")]
    for name, entry in schema["properties"].items():
        for reference in [] if name == "objective" else _references(entry):
            parts += _section(name, definitions, reference, 2)
    yield "config/index.md", "\n".join(parts)
    for folder in folders:
        yield f"config/{folder}.md", _paper_page(folder, papers, definitions)


def _paper_page(folder: str, papers: Mapping[str, str], definitions: Mapping[str, Any]) -> str:
    parts = [f"# Keys of objective: {folder}", "", "All others are on [this page](index.md).", ""]
    for name in (name for name, other in papers.items() if other == folder):
        parts += [f"## name: {name}", ""]
        parts += _section(f"objective ({name})", definitions, PAPER_CONFIGS[name].__name__, 3)
    return "\n".join(parts)


def _section(
    name: str, definitions: Mapping[str, Any], reference: str, level: int
) -> Iterator[str]:
    """Yield the lines of a section and of its nested sections."""
    section, declared = definitions[reference], _class(reference)
    yield f"{'#' * level} {name}"
    yield ""
    code = f"[`{reference}`][{declared.__module__}.{reference}]"
    yield f"{_one_line(section['description'])} ({code})"
    yield ""
    yield _table(section, declared, f"{name.split(' ')[0]}.{reference}.")
    for key, entry in section["properties"].items():
        for inner in _references(entry):
            kind = definitions[inner]["properties"].get("kind", {}).get("const")
            title = f"{name}: {key}" + (f", {kind}" if kind else "")
            yield from _section(title, definitions, inner, level + 1)


def _references(entry: Any) -> list[str]:
    """Return the names of the sections that a value may be, without duplicates."""
    if isinstance(entry, list):
        found = [name for each in entry for name in _references(each)]
    elif isinstance(entry, dict):
        here = [entry["$ref"].rpartition("/")[2]] if "$ref" in entry else []
        inside = [entry[word] for word in ("anyOf", "oneOf", "items") if word in entry]
        found = here + _references(inside)
    else:
        found = []
    return list(dict.fromkeys(found))


def _table(section: Mapping[str, Any], declared: type[Section], anchor: str) -> str:
    """Return the table of a section's keys."""
    rows = [TABLE]
    for key, entry in section["properties"].items():
        meaning = _one_line(entry.get("description", "Selects these keys."))
        cells = (_type(entry), _default(entry), meaning, _place(declared, key))
        text = " | ".join(cell.replace("|", "\\|") for cell in cells)
        rows.append(f"| `{key}`{{#{anchor}{key}}} | {text} |")
    return "\n".join([*rows, ""])


def _one_line(text: str) -> str:
    return " ".join(text.split())


def _default(entry: Mapping[str, Any]) -> str:
    if "const" in entry:
        return f"`{entry['const']}`"
    if "default" not in entry:
        return "required"
    if entry["default"] is None:
        return "absent"
    if isinstance(entry["default"], dict) and set(entry["default"]) != {"kind"}:
        return "defaults of its keys"
    return f"`{json.dumps(entry['default'], ensure_ascii=False)}`"


def _type(entry: Mapping[str, Any]) -> str:
    """Return a type as text, such as `integer > 0 or absent`."""
    if "$ref" in entry:
        return "section"
    for word in ("anyOf", "oneOf"):
        if word in entry:
            return " or ".join(dict.fromkeys(_type(each) for each in entry[word]))
    if "enum" in entry or "const" in entry:
        values = entry.get("enum", [entry.get("const")])
        return ", ".join(f"`{value}`" for value in values)
    if entry["type"] == "null":
        return "absent"
    if entry["type"] == "array":
        if "prefixItems" in entry:
            return "[" + ", ".join(_type(each) for each in entry["prefixItems"]) + "]"
        least = f", at least {entry['minItems']}" if "minItems" in entry else ""
        return f"list of {_type(entry['items'])}{least}"
    ranges = [f"{sign} {entry[word]}" for word, sign in RANGES.items() if word in entry]
    return f"{entry['type']} {', '.join(ranges)}".rstrip()


@functools.cache
def _classes() -> dict[str, type[Section]]:
    found: dict[str, type[Section]] = {}
    waiting = [Section]
    while waiting:
        for each in waiting.pop().__subclasses__():
            found[each.__name__] = each
            waiting.append(each)
    return found


def _class(name: str) -> type[Section]:
    """Return the class of a section of the schema."""
    return _classes()[name]


def _place(declared: type[Section], key: str) -> str:
    """Return file and line that declare a key, in the class, a base or the section's shorthand."""
    if key == BASED_ON:
        return "`config/yaml_tree.py`"
    shorthand = _classes().get(declared.__name__.replace("Config", "Shorthand"))
    for each in (*declared.__mro__, *([shorthand] if shorthand else [])):
        line = _lines(each).get(key) if issubclass(each, Section) else None
        if line:
            path = Path(inspect.getfile(each)).relative_to(ROOT / "megavis")
            return f"`{path.as_posix()}:{line}`"
    raise KeyError(f"{declared.__name__}.{key} is declared nowhere")


@functools.cache
def _lines(declared: type[Section]) -> dict[str, int]:
    """Return the line of each key that a class itself declares."""
    tree = ast.parse(Path(inspect.getfile(declared)).read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef) and node.name == declared.__name__:
            keys = [each for each in node.body if isinstance(each, ast.AnnAssign)]
            return {key.target.id: key.lineno for key in keys if isinstance(key.target, ast.Name)}
    return {}
