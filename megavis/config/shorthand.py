"""Shorthand keys: a model's size by its name, lengths in epochs.

They are written out when a config is read, so that a checked config, and the one that a run folder
keeps, has none of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal

from megavis.config.section import Above0, ConfigIssue, Positive, Section

CountImages = Callable[[str], int | None]
"""Returns how many images a folder of shards holds; None where there are no shards yet."""


def _size(num_layers: int, hidden_size: int, num_attention_heads: int) -> dict[str, Any]:
    return {
        "num_layers": num_layers,
        "hidden_size": hidden_size,
        "num_attention_heads": num_attention_heads,
    }


_VIT = {"normalization": "layer_norm", "norm_epsilon": 1e-6, "activation": "gelu", "add_bias": True}

PRESETS: Mapping[str, Mapping[str, Any]] = {
    "vit_s": {**_size(12, 384, 6), **_VIT},
    "vit_b": {**_size(12, 768, 12), **_VIT},
    "vit_l": {**_size(24, 1024, 16), **_VIT},
    "vit_h": {**_size(32, 1280, 16), **_VIT},
    "igpt_s": _size(24, 512, 8),
    "igpt_m": _size(36, 1024, 8),
    "igpt_l": _size(48, 1536, 16),
    "igpt_xl": _size(60, 3072, 24),
}
"""Keys of `model` by name: Vision Transformers with the norms and biases that are usual for them,
and the sizes of "Generative Pretraining from Pixels", section 3.3."""

PresetName = Literal[
    "vit_s", "vit_b", "vit_l", "vit_h", "igpt_s", "igpt_m", "igpt_l", "igpt_xl"
]  # fmt: skip


class ModelShorthand(Section):
    """In `model`."""

    preset: PresetName | None = None
    """Sizes by name, and for `vit_*` norms, activation and biases; other keys of the section take
    the place of the preset's."""


class DataShorthand(Section):
    """In `data`."""

    num_images: Positive | None = None
    """Training images of an epoch where there are no shards to count them in, as when a run is
    planned, and where several folders are mixed."""


class TrainingShorthand(Section):
    """In `training`."""

    epochs: Above0 | None = None
    """In place of `steps`: passes over the training images, rounded up to whole steps."""


class ScheduleShorthand(Section):
    """In `schedule`."""

    warmup_epochs: Above0 | None = None
    """In place of `warmup_steps`."""


class CheckpointShorthand(Section):
    """In `checkpoint`."""

    every_epochs: Above0 | None = None
    """In place of `every`."""
    keep_every_epochs: Above0 | None = None
    """In place of `keep_every`."""


class Shorthand(Section):
    """All of them, section by section."""

    model: ModelShorthand = ModelShorthand()
    data: DataShorthand = DataShorthand()
    training: TrainingShorthand = TrainingShorthand()
    schedule: ScheduleShorthand = ScheduleShorthand()
    checkpoint: CheckpointShorthand = CheckpointShorthand()


_IN_STEPS = {
    "epochs": "steps",
    "warmup_epochs": "warmup_steps",
    "every_epochs": "every",
    "keep_every_epochs": "keep_every",
}
RIVALS = {**_IN_STEPS, **{steps: epochs for epochs, steps in _IN_STEPS.items()}}
"""The key that says the same in the other unit: the one that is written last holds."""


def shorthand_keys(section: str) -> list[str]:
    """Return the shorthand keys of a section."""
    field = Shorthand.model_fields.get(section)
    return list(type(field.default).model_fields) if field else []


def write_out_preset(model: dict[str, Any], *, wins: bool = False) -> dict[str, Any]:
    """Return a `model` section with the keys of its preset in the preset's place.

    Args:
        model: the section. A preset of an unknown name stays, to be complained of.
        wins: the preset replaces keys that the section has; else these stay.
    """
    preset = PRESETS.get(str(model.get("preset")))
    if preset is None:
        return model
    keys = {key: value for key, value in model.items() if key != "preset"}
    return {**keys, **preset} if wins else {**preset, **keys}


def take_shorthand(tree: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Take the shorthand keys out of a config's sections."""
    taken: dict[str, dict[str, Any]] = {}
    for name in Shorthand.model_fields:
        section = tree.get(name)
        if isinstance(section, dict):
            taken[name] = {key: section.pop(key) for key in shorthand_keys(name) if key in section}
    return taken


def write_out_epochs(
    tree: dict[str, Any], shorthand: Shorthand, count_images: CountImages | None
) -> Iterator[ConfigIssue]:
    """Write steps in place of epochs, and yield what is wrong.

    Args:
        tree: the config's sections, without shorthand; steps are written into it.
        shorthand: what was taken out of it.
        count_images: looks into the shards; nobody does when absent.
    """
    lengths = dict(_lengths(shorthand))
    folder = tree.get("data", {}).get("train") if isinstance(tree.get("data"), dict) else None
    counted = count_images(folder) if count_images and isinstance(folder, str) else None
    images = shorthand.data.num_images if counted is None else counted
    if lengths and images is None:
        key = ".".join(next(iter(lengths)))
        yield key, f"{_unknown_number(folder)}: give data.num_images"
        return
    batch_size = _batch_size(tree)
    for (section, key), epochs in lengths.items():
        steps = _IN_STEPS[key]
        keys = tree.setdefault(section, {})
        if steps in keys:
            yield (
                f"{section}.{key}",
                f"is short for {section}.{steps}, which is given too; keep one",
            )
        keys[steps] = math.ceil(epochs * (images or 1) / batch_size)


def _lengths(shorthand: Shorthand) -> Iterator[tuple[tuple[str, str], float]]:
    for name in Shorthand.model_fields:
        section = getattr(shorthand, name)
        for key in type(section).model_fields:
            value = getattr(section, key)
            if key in _IN_STEPS and value is not None:
                yield (name, key), value


def _unknown_number(folder: object) -> str:
    if isinstance(folder, str):
        return f"how many images an epoch has is not known, since {folder} holds no shards yet"
    return "how many images an epoch has is not known, since several folders are mixed"


def _batch_size(tree: Mapping[str, Any]) -> int:
    """Return the batch size, or 1 where it is none, which another complaint says."""
    training = tree.get("training")
    size = training.get("batch_size") if isinstance(training, dict) else None
    return size if isinstance(size, int) and size > 0 else 1
