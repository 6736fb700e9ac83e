"""The JSON schema of configs, and the presets' references to it."""

import json
from pathlib import Path

import pytest

from megavis.commands.config import schema_text, write_schema
from megavis.config.schema import RunConfig
from megavis.papers import OBJECTIVES

CONFIGS = Path(__file__).parents[2] / "yaml_configs"


def test_committed_schema_is_up_to_date():
    committed = json.loads((CONFIGS / "schema.json").read_text(encoding="utf-8"))
    assert committed == json.loads(schema_text()), (
        "run `megavis schema --out yaml_configs/schema.json`"
    )


def test_sections_forbid_unknown_keys_and_describe_theirs():
    tree = json.loads(schema_text())
    sections = [tree, *tree["$defs"].values()]
    assert set(tree["properties"]) == {*RunConfig.model_fields, "based_on"}
    assert len(tree["properties"]["objective"]["oneOf"]) == len(OBJECTIVES)
    for section in sections:
        assert section["additionalProperties"] is False
        for name, key in section["properties"].items():
            described = "description" in key or "$ref" in key or "const" in key
            assert described, f"{section['title']}.{name} has no description"


def test_references_resolve():
    text = schema_text()
    tree = json.loads(text)
    for part in text.split('"$ref": "#/$defs/')[1:]:
        assert part.partition('"')[0] in tree["$defs"]


def test_paper_name_is_required():
    tree = json.loads(schema_text())
    igpt = tree["$defs"]["IGPTConfig"]
    assert igpt["properties"]["name"] == {"const": "igpt", "type": "string"}
    assert "name" in igpt["required"]


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*/*.yaml")), ids=lambda path: path.name)
def test_presets_reference_the_schema(path):
    pointers = [
        line.partition("$schema=")[2]
        for line in path.read_text(encoding="utf-8").splitlines()
        if line.startswith("# yaml-language-server:")
    ]
    assert len(pointers) == 1
    assert (path.parent / pointers[0]).resolve() == CONFIGS / "schema.json"


def test_schema_command(tmp_path, capsys):
    from megavis.config.errors import UserError

    out = tmp_path / "schema.json"
    args = type("Args", (), {"out": str(out)})
    assert write_schema(args) == 0
    assert out.read_text(encoding="utf-8") == schema_text()
    args.out = None
    assert write_schema(args) == 0
    assert json.loads(capsys.readouterr().out)
    args.out = str(tmp_path / "absent" / "schema.json")
    with pytest.raises(UserError, match=r"schema\.json cannot be written: No such file"):
        write_schema(args)
