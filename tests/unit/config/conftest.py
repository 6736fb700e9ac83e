"""A small valid config, and fixtures that read it or return its error message."""

from collections.abc import Callable
from pathlib import Path

import pytest

from megavis.config.errors import UserError
from megavis.config.load import LoadedConfig, load_config

SMALL = """\
name: small
objective:
  name: igpt
model:
  num_layers: 4
  hidden_size: 64
  num_attention_heads: 8
data:
  train: shards/train
  image_size: 8
optimizer:
  learning_rate: 1e-3
training:
  steps: 10
  batch_size: 16
"""

Read = Callable[..., LoadedConfig]


@pytest.fixture
def small() -> str:
    return SMALL


@pytest.fixture
def read(tmp_path: Path) -> Read:
    """Load a YAML text with command-line overrides."""

    def read_text(text: str = SMALL, *words: str) -> LoadedConfig:
        path = tmp_path / "config.yaml"
        path.write_text(text, encoding="utf-8")
        return load_config(path, words)

    return read_text


@pytest.fixture
def complain(read: Read, tmp_path: Path) -> Callable[..., str]:
    """Load an invalid config and return the error message without the folder."""

    def error_message(text: str = SMALL, *words: str) -> str:
        with pytest.raises(UserError) as caught:
            read(text, *words)
        return str(caught.value).replace(f"{tmp_path}/", "")

    return error_message
