"""What a config must share with the run that it resumes, or from whose weights it starts."""

from __future__ import annotations

import inspect
import math
import re
import reprlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from megavis.config.errors import UserError
from megavis.config.load import load_config
from megavis.config.schema import ObjectiveConfig, RunConfig
from megavis.config.section import ROTARY, PositionKind, Section, interpolation
from megavis.grammar.compose import ComposeConfig, in_same_words, own_model
from megavis.grammar.grammar import Grammar
from megavis.grammar.paper import PaperConfig
from megavis.grammar.words.schedules import ScheduleWord

_MAY_DIFFER = re.compile(
    "positions|position_scale|anneal|features|feature_order|drop_path|.*dropout|tokens_decay|loss_average"
)
"""Keys of model and objective that do not change the meaning of weights."""
_NO_MEANING = ("weights", "head_std", "position_std", "tokenizer", "from_run")
"""Keys of words that trained weights do not depend on: initial values, and paths, which move."""
_OF_TRAINING = ("anneal", "loss_average", "tokens_decay")
"""Keys of words that matter only if the weights are trained further in the same run."""


def check_same_run(path: Path, config: RunConfig) -> None:
    """Compare a config with the one that a run was started with, `path`.

    Raises:
        UserError: they differ in something that affects weights, samples or draws.
    """
    before = load_config(path).config
    if before.drop_path == config.drop_path:
        # Set explicitly, or taken from the model: the same rate.
        before, config = _without_own_drop_path(before), _without_own_drop_path(config)
    before, config = map(_with_mlp_size, in_same_words(before, config))
    for key in ("seed", "objective", "model", "finetune"):
        old, new = getattr(before, key), getattr(config, key)
        if old != new:
            raise UserError(
                f"{path}: this run was started with {first_difference(key, old, new)}; choose"
                " another name, or restore the value"
            )
    new_values = _order_keys(config)
    for key, value in _order_keys(before).items():
        if new_values[key] != value:
            raise UserError(
                f"{path}: this run was started with {key} {'null' if value is None else value}, on"
                " which its sample order depends; restore the value, or choose another name"
            )


def words_of(config: RunConfig) -> dict[str, Any] | None:
    """Return the words of a run's paper, as stored with its weights; None for an autoencoder."""
    if not isinstance(config.objective, PaperConfig):
        return None
    return config.objective.grammar(config).model_dump(mode="json")


def check_same_words(
    checkpoint: Path, words: Mapping[str, Any] | None, config: RunConfig, *, resumes: bool = False
) -> None:
    """Compare the words that a checkpoint was trained with and those of its run's config now.

    A paper's code may give the same keys another meaning.

    Args:
        checkpoint: the checkpoint's folder, for the message.
        words: stored in its manifest; None if they are not known, which is not checked.
        config: of its run.
        resumes: also compare what only the rest of the training depends on.

    Raises:
        UserError: they differ in something that weights or draws depend on.
    """
    if words is None or not isinstance(config.objective, PaperConfig):
        return
    now = config.objective.grammar(config)
    ignored = _NO_MEANING if resumes else (*_NO_MEANING, *_OF_TRAINING)
    try:
        differences = list(_other_words(Grammar.model_validate(words), now, (), ignored))
    except ValidationError as error:
        places = [".".join(map(str, each["loc"])) for each in error.errors()]
        differences = [f"{place}, which words no longer have" for place in places]
    if differences:
        name, remedy = config.objective.name, "restore the run's config.yaml"
        if not isinstance(config.objective, ComposeConfig):
            source = inspect.getsourcefile(type(config.objective))
            remedy += f", or what {name} means in {source}, whose changes need another name"
        raise UserError(
            f"{checkpoint}: these weights were trained with {'; '.join(differences)}: {remedy}"
        )


def _other_words(
    there: Section, here: Section, path: tuple[str, ...], ignored: Sequence[str]
) -> Iterator[str]:
    for key in type(here).model_fields:
        old, new = getattr(there, key), getattr(here, key)
        place = (*path, key)
        if old == new or key in ignored or key in here.sampling_keys:
            continue
        if type(old) is type(new) and isinstance(old, Section):
            yield from _other_words(old, new, place, ignored)
        else:
            yield f"{'.'.join(place)} {_shown(old)}, not {_shown(new)}"


def _shown(word: Any) -> str:
    """Return a word's kind, or a value as in YAML; long lists are cut."""
    if isinstance(word, Section):
        return str(getattr(word, "kind", word))
    if word is None or isinstance(word, bool):
        return "null" if word is None else str(word).lower()
    return word if isinstance(word, str) else reprlib.repr(word)


def _order_keys(config: RunConfig) -> dict[str, Any]:
    """Return what the sample order depends on, besides the seed and the size of the data."""
    data = config.data
    return {
        "training.batch_size": config.training.batch_size,
        "data.train weights": [source.weight for source in data.train_sources],
        "data.repeats": data.repeats,
        "data.images_per_class": data.images_per_class,
        "data.window_shards": data.window_shards,
    }


def _without_own_drop_path(config: RunConfig) -> RunConfig:
    if config.finetune is None:
        return config
    finetune = config.finetune.model_copy(update={"drop_path": None})
    return config.model_copy(update={"finetune": finetune})


def _with_mlp_size(config: RunConfig) -> RunConfig:
    """Write out the width of the MLP, which imported runs give where others have the default."""
    model = config.model.model_copy(update={"ffn_hidden_size": config.model.mlp_size})
    return config.model_copy(update={"model": model})


def first_difference(key: str, old: Any, new: Any) -> str:
    """Describe the first key of a section that differs, with its old and new value."""
    if not (isinstance(old, Section) and isinstance(new, Section)):
        return f"{key} {old}, not {new}" if isinstance(old, int) else f"another {key!r}"
    for name in type(old).model_fields:
        if name not in type(new).model_fields:  # another kind of section
            return f"{key}.{name} {getattr(old, name)}, not without it"
        one, other = getattr(old, name), getattr(new, name)
        if one != other and isinstance(one, Section) and isinstance(other, Section):
            return first_difference(f"{key}.{name}", one, other)
        if one != other:
            return f"{key}.{name} {one}, not {other}"
    return f"another {key!r}"


def source_differences(source: RunConfig, config: RunConfig) -> Iterator[str]:
    """Yield differences from a run whose weights a fine-tuning run starts from."""
    source, config = map(_with_mlp_size, in_same_words(source, config))
    objective = _with_own_pretraining(source, config)
    yield from _other_keys(objective, config.objective, "objective")
    yield from _other_keys(source.model, config.model, "model")
    if source.data.normalize_frames != config.data.normalize_frames:
        yield (
            f"was trained with data.normalize_frames {str(source.data.normalize_frames).lower()},"
            " which its weights depend on; set it to the same"
        )
    if not isinstance(source.objective, PaperConfig):
        return
    grammar = source.objective.grammar(source)
    yield from _other_size(source, config, grammar.positions)
    if grammar.schedule.needs_seed and source.seed != config.seed:
        yield (
            f"was trained with seed {source.seed}, which its weights depend on; set seed to"
            f" {source.seed}, not {config.seed}"
        )


def _with_own_pretraining(source: RunConfig, config: RunConfig) -> ObjectiveConfig:
    """Return the objective of a source, with the keys of a config that its features do not read."""
    there, here = source.objective, config.objective
    is_joint = config.finetune is not None and config.finetune.generative_weight > 0
    if not isinstance(there, PaperConfig) or not isinstance(here, type(there)):
        return there
    if is_joint or own_model(here.name):
        return there
    read = _read_by_features(source, there)
    if _read_by_features(source, here) == read:
        return here
    for key in type(here).model_fields:
        changed = there.model_copy(update={key: getattr(here, key)})
        if _read_by_features(source, changed) == read:
            there = changed
    return there


def _read_by_features(run: RunConfig, objective: PaperConfig) -> dict[str, Any] | None:
    """Return the words of a run with another objective that its features depend on.

    None if its keys do not fit each other, and have no words.
    """
    changed = run.model_copy(update={"objective": objective})
    if next(objective.check(changed), None) is not None:
        return None
    grammar = objective.grammar(changed)

    def kept(word: Section) -> dict[str, Any]:
        draws = isinstance(word, ScheduleWord) and word.draws_features
        dropped = () if draws else word.pretraining_keys
        parts = {key: getattr(word, key) for key in type(word).model_fields if key not in dropped}
        return {
            key: kept(part) if isinstance(part, Section) else part for key, part in parts.items()
        }

    return kept(grammar)


def _other_keys(source: Section, config: Section, name: str) -> Iterator[str]:
    """Compare two sections, key by key; a key that only one kind of section has counts as null."""
    for key in {**type(source).model_fields, **type(config).model_fields}:
        there, here = getattr(source, key, None), getattr(config, key, None)
        if there == here or _MAY_DIFFER.fullmatch(key) or key in config.sampling_keys:
            continue
        if isinstance(there, Section) and isinstance(here, Section):
            yield from _other_keys(there, here, f"{name}.{key}")
        else:
            yield (
                f"was trained with {name}.{key} {_shown(there)}, and this config has"
                f" {_shown(here)}; fine-tuning keeps the architecture"
            )


def _other_size(source: RunConfig, config: RunConfig, position_kind: PositionKind) -> Iterator[str]:
    """Check that coordinates are interpolated if the image size differs from pre-training.

    Learned positions are resized on loading.
    """
    sizes = source.data.image_size, config.data.image_size
    # Spectrogram frames have no side, and their number may not change.
    if position_kind not in ("sincos", "learned_sincos", *ROTARY) or not all(sizes):
        return
    scale = source.model.position_scale * interpolation(position_kind, *sizes)
    if not math.isclose(config.model.position_scale, scale, rel_tol=1e-3):
        yield (
            f"was trained on {sizes[0]}² pixels, and this config has {sizes[1]}²; set"
            f" model.position_scale to {scale:.6g}, which interpolates {position_kind} positions"
        )
