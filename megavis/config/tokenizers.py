"""Config keys that name the run folder of a tokenizer, in a run and in its export.

An export contains its tokenizers; its config names them relative to the folder.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from megavis.config.load import load_config
from megavis.config.schema import RunConfig

_KEY = "tokenizer"


def load_run_config(run_folder: Path) -> RunConfig:
    """Return the config of a run folder, with the paths of tokenizers inside it."""
    config = load_config(run_folder / "config.yaml").config
    inside = tokenizers_inside(config, run_folder)
    return with_tokenizers(config, {name: str(run_folder / name) for name in inside})


def tokenizers_inside(config: RunConfig, run_folder: Path) -> list[str]:
    """Return the tokenizers that a config names relative to its run folder."""
    return [path for path in exported_names(config) if (run_folder / path / "config.yaml").exists()]


def exported_names(config: RunConfig) -> dict[str, str]:
    """Return the folder of each tokenizer inside an export, by run folder."""
    found = dict.fromkeys(_named(config.objective))
    return {path: f"{_KEY}_{i}" if i else _KEY for i, path in enumerate(found)}


def with_tokenizers(config: RunConfig, paths: Mapping[str, str]) -> RunConfig:
    """Return the config with other run folders of tokenizers, where `paths` has them."""
    objective = _replaced(config.objective, lambda path: paths.get(path, path))
    return config.model_copy(update={"objective": objective})


def _named(section: BaseModel) -> Iterator[str]:
    for key in type(section).model_fields:
        value = getattr(section, key)
        if key == _KEY and value is not None:
            yield value
        elif isinstance(value, BaseModel):
            yield from _named(value)


def _replaced(section: BaseModel, change: Callable[[str], str]) -> BaseModel:
    update: dict[str, Any] = {}
    for key in type(section).model_fields:
        value = getattr(section, key)
        if key == _KEY and value is not None:
            update[key] = change(value)
        elif isinstance(value, BaseModel):
            update[key] = _replaced(value, change)
    return section.model_copy(update=update)
