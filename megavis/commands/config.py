"""`megavis config`: show a resolved config with the origin of its values, or compare two."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from megavis.commands.configs import load_user_config
from megavis.config.load import LoadedConfig
from megavis.config.yaml_tree import dump_tree, leaves

_ABSENT = "(not there)"


def show(args: argparse.Namespace) -> int:
    """Write the config as YAML, each value followed by its origin."""
    sys.stdout.write("".join(f"{line}\n" for line in _lines(_read(args.config, args.overrides))))
    return 0


def diff(args: argparse.Namespace) -> int:
    """Write the keys whose values differ between two configs; return 1 if there are any."""
    first, second = (dict(leaves(_tree(_read(path, ())))) for path in (args.first, args.second))
    keys = [*first, *(key for key in second if key not in first)]
    differing = [key for key in keys if first.get(key, _ABSENT) != second.get(key, _ABSENT)]
    for key in differing:
        old, new = (_value(known.get(key, _ABSENT)) for known in (first, second))
        sys.stdout.write(f"{key}: {old} → {new}\n")
    return 1 if differing else 0


def _read(path: str, overrides: Any) -> LoadedConfig:
    """Load a config file, or that of a run folder."""
    inside = Path(path) / "config.yaml"
    return load_user_config(str(inside) if inside.exists() else path, overrides)


def _tree(loaded: LoadedConfig) -> dict[str, Any]:
    tree: dict[str, Any] = loaded.config.model_dump(mode="json")
    return tree


def _lines(loaded: LoadedConfig) -> Iterator[str]:
    opened: list[str] = []
    for key, value in leaves(_tree(loaded)):
        *sections, name = key.split(".")
        shared = 0
        while sections[: shared + 1] == opened[: shared + 1] and shared < len(sections):
            shared += 1
        for depth in range(shared, len(sections)):
            yield f"{'  ' * depth}{sections[depth]}:"
        opened = sections
        text = f"{'  ' * len(sections)}{name}: {_value(value)}"
        yield f"{text:44}  # {_origin(loaded, key, value)}"


def _origin(loaded: LoadedConfig, key: str, value: Any) -> str:
    """Return the file and line of a value, or why it has none."""
    if key in loaded.source.lines:
        return loaded.source.place(key)
    return "default" if value == _default(loaded, key) else "computed from other keys"


def _default(loaded: LoadedConfig, key: str) -> Any:
    """Return the default of a key; None if it is required."""
    node: Any = loaded.config
    *sections, name = key.split(".")
    for section in sections:
        node = getattr(node, section, None)
    fields = getattr(type(node), "model_fields", {})
    if name not in fields or fields[name].is_required():
        return None
    return type(node).model_construct().model_dump(mode="json", include={name}).get(name)


def _value(value: Any) -> str:
    """Return a value as one line of YAML."""
    if value == _ABSENT:
        return _ABSENT
    written = dump_tree({"key": value}).removeprefix("key:").strip()
    if "\n" not in written:
        return written
    return yaml.safe_dump(value, default_flow_style=True, width=10**6).strip()
