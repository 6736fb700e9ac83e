"""Which run fine-tuning starts from, and what it refuses before anything is trained."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from pathlib import Path

from megavis.checkpoint.format.folder import chosen_checkpoint
from megavis.checkpoint.format.manifest import read_manifest
from megavis.composition.classification import Classification
from megavis.config.errors import UserError
from megavis.config.load import LoadedConfig, load_config
from megavis.config.schema import ConfigIssue, FinetuneConfig, RunConfig
from megavis.config.section import Section
from megavis.data.loading.blended_dataset import Samples

_MAY_DIFFER = re.compile("positions|position_scale|drop_path|.*dropout")
"""Keys of the model that change no weight's meaning."""


def source_checkpoint(settings: FinetuneConfig) -> Path:
    """Return the checkpoint that fine-tuning starts from; `from_run` names a run.

    Raises:
        UserError: there is no such run or checkpoint.
    """
    assert settings.from_run is not None
    return chosen_checkpoint(Path(settings.from_run), settings.from_step)


def check_source(loaded: LoadedConfig, objective: Classification, train: Samples) -> None:
    """Refuse to start from a run of another architecture or of other tokens.

    Args:
        loaded: a config whose `finetune` section names a run.
        objective: of the config.
        train: the training shards.

    Raises:
        UserError: with the key and its line.
    """
    settings = objective.settings
    try:
        checkpoint = source_checkpoint(settings)
        path = Path(settings.from_run or "") / "config.yaml"
        source = load_config(path).config
        complaint = next(_differences(source, loaded.config, objective), None)
        tokenizer = train.manifest.identity or objective.backbone.tokenizer_identity
        if complaint is None and read_manifest(checkpoint).tokenizer != tokenizer:
            complaint = f"was trained on other tokens than those of {train.directory}"
    except UserError as error:
        raise loaded.source.error([("finetune.from_run", str(error))]) from None
    if complaint is not None:
        text = f"{settings.from_run} {complaint}"
        raise loaded.source.error([("finetune.from_run", text)])


def _differences(source: RunConfig, config: RunConfig, objective: Classification) -> Iterator[str]:
    """Yield what makes the other run's weights mean something else here."""
    for section in ("objective", "model"):
        yield from _other_keys(getattr(source, section), getattr(config, section), section)
    yield from _other_size(source, config, objective.paper.position_kind)
    if objective.paper.weights_need_their_seed and source.seed != config.seed:
        yield (
            f"was trained with seed {source.seed}, which its weights depend on; set seed to"
            f" {source.seed}, not {config.seed}"
        )


def _other_keys(source: Section, config: Section, name: str) -> Iterator[str]:
    """Compare two sections, key by key."""
    for key in {**type(source).model_fields, **type(config).model_fields}:
        there, here = getattr(source, key, None), getattr(config, key, None)
        if there == here or _MAY_DIFFER.fullmatch(key) or key in config.sampling_keys:
            continue
        if isinstance(there, Section) and isinstance(here, Section):
            yield from _other_keys(there, here, f"{name}.{key}")
        else:
            yield (
                f"was trained with {name}.{key} {there}, and this config has {here}; fine-tuning"
                " keeps the architecture"
            )


def _other_size(source: RunConfig, config: RunConfig, position_kind: str) -> Iterator[str]:
    """Want coordinates that are interpolated where images have another size than in pre-training.

    Learned positions are resized as they are read.
    """
    if position_kind not in ("sincos", "rope_1d", "rope_2d"):
        return
    sizes = source.data.image_size, config.data.image_size
    scale = source.model.position_scale * sizes[0] / sizes[1]
    if not math.isclose(config.model.position_scale, scale, rel_tol=1e-3):
        yield (
            f"was trained on {sizes[0]}² pixels, and this config has {sizes[1]}²; set"
            f" model.position_scale to {scale:.6g}, which interpolates {position_kind} positions"
        )


def label_issues(
    key: str, dataset: Samples, settings: FinetuneConfig, class_names: tuple[str, ...]
) -> Iterator[ConfigIssue]:
    """Yield what is wrong with the labels of a data set.

    Args:
        key: which of the config's data sets.
        dataset: its shards.
        settings: the `finetune` section.
        class_names: those of the training shards.
    """
    where, missing = dataset.directory, int((dataset.labels < 0).sum())
    if missing:
        yield key, f"{where} holds {missing} images without a label, of {len(dataset)} in all"
    elif len(dataset.class_names) != settings.num_classes:
        text = f"{where} has {len(dataset.class_names)} classes; finetune.num_classes is"
        yield key, f"{text} {settings.num_classes}"
    elif dataset.class_names != class_names:
        yield (
            key,
            f"{where} numbers its classes in another way than data.train: write its shards with"
            " --classes-from",
        )
