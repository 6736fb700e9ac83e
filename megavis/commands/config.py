"""`megavis config` and `megavis schema`: read and compare configs, and write their JSON schema."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml

from megavis.checkpoint.format.folder import latest_checkpoint
from megavis.checkpoint.format.manifest import read_manifest
from megavis.config.errors import UserError
from megavis.config.load import (
    LoadedConfig,
    did_you_mean,
    dump_config,
    load_config,
    load_run_config,
)
from megavis.config.papers import PAPER_CONFIGS
from megavis.config.schema import ObjectiveConfig, RunConfig
from megavis.config.shorthand import PRESETS, RIVALS, Shorthand
from megavis.config.yaml_tree import BASED_ON, dump_tree, leaves
from megavis.data.format.manifest import num_images
from megavis.grammar.compose import written_out
from megavis.grammar.same_run import check_same_words

_ABSENT = "(not there)"
SHIPPED = "yaml_configs"


def show(args: argparse.Namespace) -> int:
    """Write the config as YAML, each value followed by its origin; or the paper in words."""
    if args.grammar:
        _check_words(Path(args.config))
        sys.stdout.write(dump_config(written_out(_read(args.config, args.overrides).config)))
        return 0
    sys.stdout.write("".join(f"{line}\n" for line in _lines(_read(args.config, args.overrides))))
    return 0


def _check_words(run_folder: Path) -> None:
    """Raise UserError if a run's newest checkpoint was trained with other words than it means now.

    They would not be the words of a config that trains the same run.
    """
    if not (run_folder / "config.yaml").exists():
        return
    if (checkpoint := latest_checkpoint(run_folder)) is not None:
        words, config = read_manifest(checkpoint).words, load_run_config(run_folder)
        check_same_words(checkpoint, words, config, resumes=True)


def diff(args: argparse.Namespace) -> int:
    """Write the keys whose values differ between two configs; return 1 if there are any."""
    first, second = (
        dict(leaves(_read(path, ()).config.model_dump(mode="json")))
        for path in (args.first, args.second)
    )
    keys = [*first, *(key for key in second if key not in first)]
    differing = [key for key in keys if first.get(key, _ABSENT) != second.get(key, _ABSENT)]
    for key in differing:
        old, new = (_value(known.get(key, _ABSENT)) for known in (first, second))
        sys.stdout.write(f"{key}: {old} → {new}\n")
    return 1 if differing else 0


def _read(path: str, overrides: Any) -> LoadedConfig:
    """Load a config file, or a run folder's."""
    inside = Path(path) / "config.yaml"
    return load_user_config(str(inside) if inside.exists() else path, overrides)


def _lines(loaded: LoadedConfig) -> Iterator[str]:
    opened: list[str] = []
    for key, value in leaves(loaded.config.model_dump(mode="json")):
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
        # Some sections may be null, and items of lists have numbers instead of names.
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


def load_user_config(path: str, overrides: Sequence[str]) -> LoadedConfig:
    """Load a config file as `load_config` does, resolving epochs from its shards."""
    return load_config(find_config(path), overrides, count_images=num_images)


def find_config(path: str) -> Path:
    """Return a config file; `yaml_configs/...` is also searched for among the shipped ones."""
    given = Path(path)
    if given.exists():
        return given
    looked = [given.absolute().parent]
    if given.parts[:1] == (SHIPPED,):
        shipped = shipped_configs().joinpath(*given.parts[1:])
        if shipped.exists():
            return shipped
        looked += [shipped.parent] * (shipped.parent != looked[0])
    there = [path.name for folder in looked for path in folder.glob("*.yaml")]
    folders = " or ".join(map(str, looked))
    raise UserError(f"{path}: no such config file in {folders}{did_you_mean(given.name, there)}")


def shipped_configs() -> Path:
    """Return the folder of the shipped configs: inside an installed package, or of the checkout."""
    package = Path(__file__).parents[1]
    installed = package / SHIPPED
    return installed if installed.exists() else package.parent / SHIPPED


def write_schema(args: argparse.Namespace) -> int:
    """Write the schema to a file or standard output."""
    text = schema_text()
    if args.out is None:
        sys.stdout.write(text)
        return 0
    try:
        Path(args.out).write_text(text, encoding="utf-8")
    except OSError as error:
        raise UserError(f"{args.out} cannot be written: {error.strerror}") from None
    return 0


def schema_text() -> str:
    """Return the schema as in `yaml_configs/schema.json`."""
    return json.dumps(json_schema(), indent=2, ensure_ascii=False) + "\n"


def json_schema() -> dict[str, Any]:
    """Return the JSON schema of a config file, with each paper's own `objective` section."""
    schema = RunConfig.model_json_schema()
    # Replace the shared objective section by each paper's own.
    del schema["$defs"][ObjectiveConfig.__name__]
    papers = []
    for name, paper in sorted(PAPER_CONFIGS.items()):
        section = paper.model_json_schema(ref_template="#/$defs/{model}")
        schema["$defs"].update(section.pop("$defs", {}))
        section["properties"]["name"] = {"const": name, "type": "string"}
        section["required"] = ["name", *section.get("required", [])]
        schema["$defs"][paper.__name__] = section
        papers.append({"$ref": f"#/$defs/{paper.__name__}"})
    schema["properties"]["objective"] = {"oneOf": papers, "description": "The paper's own keys."}
    _add_shorthand(schema)
    _allow_a_base(schema)
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema}


def _add_shorthand(schema: dict[str, Any]) -> None:
    """Add the shorthand keys, and make the keys that they expand to optional."""
    for name, field in Shorthand.model_fields.items():
        section = schema["$defs"][schema["properties"][name]["$ref"].rpartition("/")[2]]
        keys = type(field.default).model_json_schema()["properties"]
        section["properties"] |= keys
        replaced = {RIVALS.get(key) for key in keys}
        if "preset" in keys:
            replaced |= set(next(iter(PRESETS.values())))
        if "required" in section:
            section["required"] = [key for key in section["required"] if key not in replaced]


def _allow_a_base(schema: dict[str, Any]) -> None:
    """Require keys without a default only in files without a base."""
    whole: dict[str, Any] = {"required": schema.pop("required"), "properties": {}}
    for name, section in schema["properties"].items():
        definition = schema["$defs"].get(section.get("$ref", "").rpartition("/")[2], {})
        if required := definition.pop("required", None):
            whole["properties"][name] = {"required": required}
    schema["properties"][BASED_ON] = {
        "description": "A file, relative to this one, that provides the keys missing here.",
        "title": "Based On",
        "type": "string",
    }
    schema |= {"if": {"required": [BASED_ON]}, "else": whole}
