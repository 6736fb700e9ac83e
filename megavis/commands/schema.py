"""`megavis schema`: JSON schema with which editors complete and check config files."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from megavis.config.errors import UserError
from megavis.config.papers import PAPER_CONFIGS
from megavis.config.schema import ObjectiveConfig, RunConfig
from megavis.config.shorthand import PRESETS, RIVALS, Shorthand
from megavis.config.yaml_tree import BASED_ON


def run(args: argparse.Namespace) -> int:
    """Write the schema.

    Raises:
        UserError: the file cannot be written.
    """
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
    """Return the JSON schema of a config file, for editors."""
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
