"""Every config that is shipped is legal, and says which run it is."""

from pathlib import Path

import pytest

from megavis.config.load import load_config

pytestmark = pytest.mark.once

CONFIGS = sorted((Path(__file__).parents[3] / "yaml_configs").glob("*/*.yaml"))


@pytest.fixture(scope="module")
def presets():
    return {path: load_config(path).config for path in CONFIGS}


def test_runs_of_two_presets_do_not_share_a_folder(presets):
    names = [config.name for config in presets.values()]
    assert len(set(names)) == len(names) > 10


def test_a_preset_is_named_after_its_paper_and_file(presets):
    for path, config in presets.items():
        assert config.name == f"{path.parent.name}_{path.stem}"
