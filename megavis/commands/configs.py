"""Load a user's config files without torch."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from megavis.config.errors import UserError
from megavis.config.load import LoadedConfig, load_config
from megavis.data.format.manifest import num_images

SHIPPED = "yaml_configs"


def load_user_config(path: str, overrides: Sequence[str]) -> LoadedConfig:
    """Load a config file, resolving epochs from its shards.

    Raises:
        UserError: there is no such file, or see `load_config`.
    """
    return load_config(find_config(path), overrides, count_images=num_images)


def find_config(path: str) -> Path:
    """Return a config file, or the shipped one of that name.

    Args:
        path: of a file; `yaml_configs/...` is also searched for among the shipped ones.

    Raises:
        UserError: there is no such file; the message names the folders searched.
    """
    given = Path(path)
    if given.exists():
        return given
    looked = [str(given.absolute().parent)]
    if given.parts[:1] == (SHIPPED,):
        shipped = shipped_configs().joinpath(*given.parts[1:])
        if shipped.exists():
            return shipped
        looked.append(str(shipped.parent))
    raise UserError(f"{path}: no such config file in {' or '.join(looked)}")


def shipped_configs() -> Path:
    """Return the folder of the shipped configs: inside an installed package, or of the checkout."""
    package = Path(__file__).parents[1]
    installed = package / SHIPPED
    return installed if installed.exists() else package.parent / SHIPPED
