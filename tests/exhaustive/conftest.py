"""Configs of all small models, with shards of each kind."""

from collections.abc import Callable
from pathlib import Path

import pytest
from small_configs import config_writer


@pytest.fixture(scope="module")
def write_config(
    shards: Path, image_shards: Path, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], Path]:
    """Write the config of a small model with two blocks of 32 channels; return its path."""
    return config_writer(shards, image_shards, tmp_path_factory.mktemp("small"))
