"""Shorthand keys: model sizes by name, durations in epochs.

They are expanded when a config is read, so neither a checked config nor the one in a run folder
contains them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from fractions import Fraction
from typing import Any, Literal

from megavis.config.errors import blame
from megavis.config.section import Above0, ConfigIssue, Positive, Section

CountImages = Callable[[str], int | None]
"""Returns the number of images in a folder of shards; None if there are no shards yet."""
_VIT = {"normalization": "layer_norm", "norm_epsilon": 1e-6, "activation": "gelu", "add_bias": True}
_IN_STEPS = {
    "epochs": "steps",
    "warmup_epochs": "warmup_steps",
    "every_epochs": "every",
    "keep_every_epochs": "keep_every",
}


def _size(num_layers: int, hidden_size: int, num_attention_heads: int) -> dict[str, Any]:
    return {
        "num_layers": num_layers,
        "hidden_size": hidden_size,
        "num_attention_heads": num_attention_heads,
    }


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
"""Keys of `model` by name: Vision Transformers with their usual norms and biases,
and the sizes of "Generative Pretraining from Pixels", section 3.3."""

PresetName = Literal[
    "vit_s", "vit_b", "vit_l", "vit_h", "igpt_s", "igpt_m", "igpt_l", "igpt_xl"
]  # fmt: skip


class ModelShorthand(Section):
    """Shorthand keys of `model`."""

    preset: PresetName | None = None
    """Model size by name; for `vit_*` also norms, activation and biases. Other keys of the section
    override the preset."""


class DataShorthand(Section):
    """Shorthand keys of `data`."""

    num_images: Positive | None = None
    """Training images per epoch, if there are no shards to count them in, as when a run is
    planned, or if several folders are mixed."""


class TrainingShorthand(Section):
    """Shorthand keys of `training`."""

    epochs: Above0 | None = None
    """Passes over the training images, instead of `steps`; rounded up to whole steps."""


class ScheduleShorthand(Section):
    """Shorthand keys of `schedule`."""

    warmup_epochs: Above0 | None = None
    """In place of `warmup_steps`."""


class CheckpointShorthand(Section):
    """Shorthand keys of `checkpoint`."""

    every_epochs: Above0 | None = None
    """In place of `every`."""
    keep_every_epochs: Above0 | None = None
    """In place of `keep_every`."""


class Shorthand(Section):
    """All shorthand keys by section."""

    model: ModelShorthand = ModelShorthand()
    data: DataShorthand = DataShorthand()
    training: TrainingShorthand = TrainingShorthand()
    schedule: ScheduleShorthand = ScheduleShorthand()
    checkpoint: CheckpointShorthand = CheckpointShorthand()


RIVALS = {**_IN_STEPS, **{steps: epochs for epochs, steps in _IN_STEPS.items()}}
"""The same key in the other unit; the last one given takes precedence."""


def shorthand_keys(section: str) -> list[str]:
    """Return the shorthand keys of a section."""
    field = Shorthand.model_fields.get(section)
    return list(type(field.default).model_fields) if field else []


def write_out_preset(model: dict[str, Any], *, wins: bool = False) -> dict[str, Any]:
    """Expand the preset of a `model` section; an unknown one stays, to be reported later.

    With `wins`, the preset overrides keys of the section.
    """
    preset = PRESETS.get(str(model.get("preset")))
    if preset is None:
        return model
    keys = {key: value for key, value in model.items() if key != "preset"}
    return {**keys, **preset} if wins else {**preset, **keys}


def take_shorthand(tree: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Remove and return the shorthand keys of a config's sections."""
    taken: dict[str, dict[str, Any]] = {}
    for name in Shorthand.model_fields:
        section = tree.get(name)
        if isinstance(section, dict):
            taken[name] = {key: section.pop(key) for key in shorthand_keys(name) if key in section}
    return taken


def write_out_epochs(
    tree: dict[str, Any], shorthand: Shorthand, count_images: CountImages | None
) -> Iterator[ConfigIssue]:
    """Replace epochs by steps in a tree without shorthand, and yield errors.

    Without `count_images`, `data.num_images` must say how many images an epoch has.
    """
    lengths = dict(_lengths(shorthand))
    folder = tree.get("data", {}).get("train") if isinstance(tree.get("data"), dict) else None
    with blame("data.train"):
        counted = count_images(folder) if count_images and isinstance(folder, str) else None
    images = shorthand.data.num_images if counted is None else counted
    if lengths and images is None:
        key = ".".join(next(iter(lengths)))
        yield key, f"the number of images per epoch is unknown, since {_why_unknown(folder)}"
        return
    data = tree.get("data")
    if lengths and isinstance(data, dict) and data.get("images_per_class") is not None:
        key = ".".join(next(iter(lengths)))
        yield key, "counts all images; with data.images_per_class give steps instead"
        return
    batch_size = _batch_size(tree)
    for (section, key), epochs in lengths.items():
        steps = _IN_STEPS[key]
        keys = tree.setdefault(section, {})
        if steps in keys:
            text = f"is short for {section}.{steps}, which is given too; keep one"
            yield f"{section}.{key}", text
        # As written: in binary 1.1 is more, and 1.1 epochs of 500 steps were 551.
        keys[steps] = math.ceil(Fraction(str(epochs)) * (images or 1) / batch_size)


def _lengths(shorthand: Shorthand) -> Iterator[tuple[tuple[str, str], float]]:
    for name in Shorthand.model_fields:
        section = getattr(shorthand, name)
        for key in type(section).model_fields:
            value = getattr(section, key)
            if key in _IN_STEPS and value is not None:
                yield (name, key), value


def _why_unknown(folder: object) -> str:
    if folder is None:
        return "data.train is missing"
    reason = "several folders are mixed"
    if isinstance(folder, str):
        reason = f"{folder} holds no shards yet"
    return f"{reason}: set data.num_images"


def _batch_size(tree: Mapping[str, Any]) -> int:
    """Return the batch size, or 1 if it is invalid, which is reported elsewhere."""
    training = tree.get("training")
    size = training.get("batch_size") if isinstance(training, dict) else None
    return size if isinstance(size, int) and size > 0 else 1
