"""Reject resuming with a config or data that would change the run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from megavis.checkpoint.format.folder import checkpoints_by_age
from megavis.checkpoint.format.manifest import CheckpointManifest
from megavis.config.errors import UserError
from megavis.config.load import load_config
from megavis.config.schema import RunConfig
from megavis.config.section import Section
from megavis.data.loading.blended_dataset import Samples


def check_same_tokenizer(
    manifest: CheckpointManifest, data: Samples, tokenizer: str | None
) -> None:
    """Compare the tokenizer with that of a checkpoint, by SHA-256.

    Raises:
        UserError: they differ.
    """
    before = manifest.tokenizer
    if before != tokenizer:
        raise UserError(
            f"{data.directory}: its {data.manifest.tokenizer_name} {str(tokenizer)[:12]} is not the"
            f" one of the run's step {manifest.step}, {str(before)[:12]}; use the one that the run"
            " was started with, or choose another name"
        )


def check_earlier_run(config: RunConfig) -> None:
    """Compare a config with the run in its folder, if there is one.

    Raises:
        UserError: see `check_same_run`.
    """
    folder = Path(config.folder)
    if checkpoints_by_age(folder):
        check_same_run(folder / "config.yaml", config)


def check_same_run(path: Path, config: RunConfig) -> None:
    """Compare a config with the one that a run was started with, `path`.

    Raises:
        UserError: they differ in something that affects weights, samples or draws.
    """
    before = load_config(path).config
    if before.drop_path == config.drop_path:
        # Set explicitly, or taken from the model: the same rate.
        before, config = _without_own_drop_path(before), _without_own_drop_path(config)
    for key in ("seed", "objective", "model", "finetune"):
        old, new = getattr(before, key), getattr(config, key)
        if old != new:
            raise UserError(
                f"{path}: this run was started with {_first_difference(key, old, new)}; choose"
                " another name, or restore the value"
            )
    new_values = _order_keys(config)
    for key, value in _order_keys(before).items():
        if new_values[key] != value:
            raise UserError(
                f"{path}: this run was started with {key} {'null' if value is None else value}, on"
                " which its sample order depends; restore the value, or choose another name"
            )


def _order_keys(config: RunConfig) -> dict[str, Any]:
    """Return what the sample order depends on, besides the seed and the size of the data."""
    data = config.data
    return {
        "training.batch_size": config.training.batch_size,
        "data.train weights": [source.weight for source in data.train_sources],
        "data.repeats": data.repeats,
        "data.images_per_class": data.images_per_class,
    }


def _without_own_drop_path(config: RunConfig) -> RunConfig:
    if config.finetune is None:
        return config
    finetune = config.finetune.model_copy(update={"drop_path": None})
    return config.model_copy(update={"finetune": finetune})


def _first_difference(key: str, old: Any, new: Any) -> str:
    """Describe the first key of a section that differs, with its old and new value."""
    if not (isinstance(old, Section) and isinstance(new, Section)):
        return f"{key} {old}, not {new}" if isinstance(old, int) else f"another {key!r}"
    for name in type(old).model_fields:
        if getattr(old, name) != getattr(new, name, None):
            return f"{key}.{name} {getattr(old, name)}, not {getattr(new, name, 'without it')}"
    return f"another {key!r}"
