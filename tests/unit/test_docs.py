"""Documents agree with the code; tests/distributed runs the printed paper."""

import json
import re
import shlex
from pathlib import Path

import pytest

from data_tools.__main__ import build_parser
from megavis.cli import COMMANDS, read_arguments
from megavis.config.papers import paper_imports

pytestmark = pytest.mark.once

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
DOCUMENTS = sorted([*DOCS.rglob("*.md"), *ROOT.glob("*.md"), ROOT / "benchmarks" / "README.md"])
DATA_TOOLS = build_parser()
PLACEHOLDERS = {"$split": "train", "$SLURM_ARRAY_TASK_ID": "1"}

every_document = pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)


def blocks(language):
    text = (DOCS / "add-a-paper.md").read_text(encoding="utf-8")
    return re.findall(rf"^```{language}\n(.*?)^```$", text, flags=re.MULTILINE | re.DOTALL)


@every_document
def test_links_and_named_files_exist(path):
    """Links and paths within the checkout resolve."""
    text = path.read_text(encoding="utf-8")
    targets = re.findall(r"\]\((?!https?:|#)([^)#]+)", text)
    missing = [target for target in targets if not (path.parent / target).exists()]
    named = re.findall(
        r"`((?:megavis|docs|launch|tests|yaml_configs|data_tools)/[\w./-]+\.\w+)`", text
    )
    missing += [name for name in named if not (ROOT / name).exists()]
    assert not missing


def printed_commands(text):
    """Yield the command lines of `megavis` and `data_tools` in a document's code blocks."""
    for block in re.findall(r"^```\w*\n(.*?)^```$", text, flags=re.MULTILINE | re.DOTALL):
        for line in block.replace("\\\n", " ").splitlines():
            found = re.search(
                r"(?:-m megavis\.cli|\bmegavis|python -m data_tools) [a-z-]+ .*", line
            )
            if found and not line.lstrip().startswith("#"):
                yield found[0].replace("-m megavis.cli", "megavis")


def options_of(command):
    """Parse a command line as the program does."""
    for name, value in PLACEHOLDERS.items():
        command = command.replace(name, value)
    words = [word.rstrip("'") for word in shlex.split(command.replace("'", ""), comments=True)]
    if "&&" in words:
        words = words[: words.index("&&")]
    if words[0] == "megavis":
        return read_arguments(words[1:])
    return DATA_TOOLS.parse_args(words[3:])


@every_document
def test_printed_commands_have_valid_options(path):
    for command in printed_commands(path.read_text(encoding="utf-8")):
        assert options_of(command).run


def test_readme_names_every_command():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert not [name for name in COMMANDS if f"`megavis {name}" not in text]


def test_readme_names_every_form_of_released_weights():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    named = re.search(r"import released weights \((.*?)\)", text)[1]
    forms = ["huggingface", *(spec.name for spec in paper_imports())]
    assert sorted(re.findall("`(.*?)`", named)) == sorted(forms)


def config_keys():
    """Return the keys of each config section from the JSON schema."""
    schema = json.loads((ROOT / "yaml_configs" / "schema.json").read_text(encoding="utf-8"))
    found = {}
    for name, section in schema["properties"].items():
        parts = [section, *section.get("anyOf", []), *section.get("oneOf", [])]
        references = [part["$ref"].rpartition("/")[2] for part in parts if "$ref" in part]
        keys = [key for each in references for key in schema["$defs"][each]["properties"]]
        if keys:
            found[name] = set(keys)
    return found


@every_document
def test_named_config_keys_exist(path):
    known = config_keys()
    text = path.read_text(encoding="utf-8")
    # In backticks, alone or with a value, and as command-line overrides.
    sections = "|".join(known)
    named = re.findall(rf"`({sections})\.(\w+)(?=[`:=])", text)
    named += re.findall(rf" ({sections})\.(\w+)=", text)
    assert not [f"{section}.{key}" for section, key in named if key not in known[section]]
