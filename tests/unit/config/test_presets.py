"""Every shipped config loads and has a unique, matching run name."""

from pathlib import Path

import pytest

from megavis.config.load import load_config

pytestmark = pytest.mark.once

CONFIGS = sorted((Path(__file__).parents[3] / "yaml_configs").glob("*/*.yaml"))


@pytest.fixture(scope="module")
def presets():
    return {path: load_config(path).config for path in CONFIGS}


def test_run_names_are_unique(presets):
    names = [config.name for config in presets.values()]
    assert len(set(names)) == len(names) > 10


def test_run_name_is_paper_and_file_name(presets):
    for path, config in presets.items():
        assert config.name == f"{path.parent.name}_{path.stem}"
