"""Load a user's config files without torch."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from megavis.config.errors import UserError
from megavis.config.load import LoadedConfig, load_config
from megavis.data.format.manifest import num_images


def load_user_config(path: str, overrides: Sequence[str]) -> LoadedConfig:
    """Load a config file, resolving epochs from its shards.

    Raises:
        UserError: there is no such file, or see `load_config`.
    """
    if not Path(path).exists():
        raise UserError(f"{path}: no such config file")
    return load_config(path, overrides, count_images=num_images)
