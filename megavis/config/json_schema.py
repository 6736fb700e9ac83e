"""JSON schema with which editors complete and check config files."""

from __future__ import annotations

from typing import Any

from megavis.config.papers import PAPER_CONFIGS
from megavis.config.schema import ObjectiveConfig, RunConfig
from megavis.config.shorthand import PRESETS, RIVALS, Shorthand
from megavis.config.yaml_tree import BASED_ON


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
