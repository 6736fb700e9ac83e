"""Every shipped config loads and has a unique, matching run name."""

import itertools
import json
import re
from pathlib import Path

import pytest

from megavis.config.load import load_config

pytestmark = pytest.mark.once

SCHEMA = json.loads((Path(__file__).parents[3] / "yaml_configs/schema.json").read_text())
SECTIONS = sorted(name for name, value in SCHEMA["properties"].items() if "type" not in value)
CONFIGS = sorted((Path(__file__).parents[3] / "yaml_configs").glob("*/*.yaml"))


def _keys(node):
    """Yield the names of all keys of the schema."""
    children = node.values() if isinstance(node, dict) else node if isinstance(node, list) else ()
    if isinstance(node, dict):
        yield from node.get("properties", {})
    for child in children:
        yield from _keys(child)


KEYS = set(_keys(SCHEMA))


@pytest.fixture(scope="module")
def presets():
    return {path: load_config(path).config for path in CONFIGS}


def test_run_names_are_unique(presets):
    names = [config.name for config in presets.values()]
    assert len(set(names)) == len(names) > 10


def test_run_name_is_paper_and_file_name(presets):
    for path, config in presets.items():
        assert config.name == f"{path.parent.name}_{path.stem}"


def _flat(tree, prefix=""):
    """Yield dotted keys and values of a config."""
    for key, value in tree.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def test_what_changes_one_key_is_no_preset(presets):
    """It is a run of docs/papers, except for layouts, and the VAE that `plan --tokenizer` reads."""
    apart = {"name", "finetune.from_run"}
    flat = {
        path: {key: value for key, value in _flat(config.model_dump()) if key not in apart}
        for path, config in presets.items()
        if not re.search(r"_\d+x\d", path.stem)
    }
    close = [
        {one.stem, other.stem}
        for one, other in itertools.combinations(flat, 2)
        if one.parent == other.parent
        and sum(flat[one].get(key) != flat[other].get(key) for key in {**flat[one], **flat[other]})
        < 2
    ]
    assert close == [{"vae", "vae_large"}]


def test_no_preset_has_an_experimental_layout(presets):
    for path, config in presets.items():
        parallel = config.parallel
        is_staged = parallel.pipeline_model_parallel_size > 1
        assert not (is_staged and parallel.zero_stage > 1), f"{path}: pipeline stages with ZeRO > 1"


@pytest.mark.parametrize("path", [each for each in CONFIGS if each.parent.name in ("igpt", "mp3")])
def test_comments_name_keys_that_the_config_uses(path):
    """xl_64 spoke of warmup_steps, and used warmup_epochs."""
    used = set(re.findall(r"^\s*(\w+):", "".join(_with_bases(path)), re.MULTILINE))
    for line in path.read_text().splitlines():
        comment = re.sub("`[^`]*`", "", line.partition("#")[2])
        bare = re.findall(r"(?<![\w./=-])([a-z]+(?:_[a-z]+)+)(?![\w/=.-])", comment)
        assert not (set(bare) & KEYS) - used, line
        qualified = re.findall(rf"(?<![\w/])(?:{'|'.join(SECTIONS)})\.(\w+)", comment)
        assert set(qualified) <= KEYS, line


def _with_bases(path):
    text = path.read_text()
    base = re.search(r"^based_on: (\S+)", text, re.MULTILINE)
    return [text, *(_with_bases(path.parent / base[1]) if base else [])]
