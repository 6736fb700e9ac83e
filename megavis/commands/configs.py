"""Config files of a user's, read without torch."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from megavis.config.errors import UserError
from megavis.config.load import LoadedConfig, load_config
from megavis.data.format.manifest import num_images


def load_user_config(path: str, overrides: Sequence[str]) -> LoadedConfig:
    """Load a config file whose epochs are those of its shards.

    Raises:
        UserError: there is no such file, or as `load_config`.
    """
    if not Path(path).exists():
        raise UserError(f"{path}: no such config file")
    return load_config(path, overrides, count_images=num_images)
