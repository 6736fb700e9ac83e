"""From a YAML file and `key=value` words to a checked `RunConfig`.

Every error names the file, the line and the key, and says what would be right. All errors of
one reading are raised as one `UserError`.
"""

from __future__ import annotations

import reprlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from megavis.config.checks import check_config, check_world
from megavis.config.names import SchemaNames, did_you_mean
from megavis.config.papers import PAPER_CONFIGS
from megavis.config.schema import ConfigIssue, ObjectiveConfig, RunConfig
from megavis.config.shorthand import CountImages, Shorthand, take_shorthand, write_out_epochs
from megavis.config.yaml_tree import ConfigSource, apply_override, dump_tree, read_tree


@dataclass(frozen=True)
class LoadedConfig:
    """A checked config and the locations of its keys."""

    config: RunConfig
    source: ConfigSource

    def require_world(self, world_size: int) -> None:
        """Raise `UserError` if the config does not fit `world_size` processes."""
        complaints = list(check_world(self.config, world_size))
        if complaints:
            raise self.source.error(complaints)


def load_config(
    path: str | Path,
    overrides: Sequence[str] = (),
    *,
    count_images: CountImages | None = None,
) -> LoadedConfig:
    """Read a YAML file, apply `key=value` words, check everything.

    Args:
        path: the YAML file.
        overrides: words such as `training.steps=100`; the value is read as YAML.
        count_images: counts images in shards, for durations in epochs; without it the config needs
            `data.num_images`.

    Raises:
        UserError: every mistake with file, line, key and what would be right.
    """
    source = ConfigSource(str(path))
    tree = read_tree(Path(path), source)
    for word in overrides:
        apply_override(tree, word, source)
    config = _validate(tree, source, count_images)
    complaints = list(check_config(config))
    if complaints:
        raise source.error(complaints)
    return LoadedConfig(config, source)


def _validate(
    tree: dict[str, Any],
    source: ConfigSource,
    count_images: CountImages | None,
) -> RunConfig:
    names = SchemaNames(tree)
    if names.objective is None:
        given = f", not {reprlib.repr(names.paper)}" if names.paper is not None else ""
        known = ", ".join(sorted(PAPER_CONFIGS))
        text = (
            f"must say which paper: one of {known}{given}{did_you_mean(names.paper, PAPER_CONFIGS)}"
        )
        raise source.error([("objective.name", text)])
    complaints: list[ConfigIssue] = []
    try:
        shorthand = Shorthand.model_validate(take_shorthand(tree))
        complaints += write_out_epochs(tree, shorthand, count_images)
    except ValidationError as error:
        complaints += names.explain(error.errors())
    if complaints:
        # Otherwise the keys that they expand to would be reported as missing.
        raise source.error(complaints)
    # Validate the objective first, with its paper's class, so its errors keep their keys.
    try:
        tree["objective"] = names.objective.model_validate(tree["objective"])
    except ValidationError as error:
        complaints += names.explain(error.errors(), ["objective"])
        tree["objective"] = ObjectiveConfig(name="")
    try:
        config = RunConfig.model_validate(tree)
    except ValidationError as error:
        complaints += names.explain(error.errors())
    if complaints:
        raise source.error(complaints)
    return config


def dump_config(config: RunConfig) -> str:
    """Return the resolved config as YAML that `load_config` reads back to the same config."""
    tree = config.model_dump(mode="json")
    return dump_tree(tree)
