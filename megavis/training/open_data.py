"""Open the shards of a config, and check them against the objective."""

from __future__ import annotations

from megavis.composition.trainable import Trainable
from megavis.config.errors import UserError
from megavis.config.load import LoadedConfig
from megavis.data.codecs.transforms import Transform, evaluation_transform
from megavis.data.loading.blended_dataset import BlendedDataset, Samples
from megavis.data.loading.dataset import ShardDataset
from megavis.tokenizers.palette import Palette


def open_data(
    loaded: LoadedConfig, key: str, path: str, transform: Transform, objective: Trainable
) -> ShardDataset:
    """Open a shard folder.

    Args:
        loaded: the config.
        key: which of its keys names the folder.
        path: the folder.
        transform: what is cut out of images.
        objective: says which shards it wants.

    Raises:
        UserError: with the key and its line.
    """
    palette = _open_palette(loaded)
    try:
        dataset = ShardDataset(path, transform, cache=loaded.config.data.cache, palette=palette)
    except UserError as error:
        raise loaded.source.error([(key, str(error))]) from None
    what = f"{path}, read with data.palette," if palette else path
    complaints = [(key, f"{what} {text}") for text in objective.check_data(dataset.manifest)]
    missing = int((dataset.labels < 0).sum()) if objective.backbone.needs_labels else 0
    if missing and not complaints:
        text = f"{path} holds {missing} samples without a label, of {len(dataset)} in all"
        complaints.append((key, f"{text}, and this model has no row for them"))
    if complaints:
        raise loaded.source.error(complaints)
    return dataset


def _open_palette(loaded: LoadedConfig) -> Palette | None:
    path = loaded.config.data.palette
    try:
        return Palette.load(path) if path else None
    except UserError as error:
        raise loaded.source.error([("data.palette", str(error))]) from None


def open_training_data(loaded: LoadedConfig, transform: Transform, objective: Trainable) -> Samples:
    """Open the shard folder of `data.train`, or mix several; arguments as `open_data` has them."""
    data = loaded.config.data
    if isinstance(data.train, str):
        return open_data(loaded, "data.train", data.train, transform, objective)
    parts = [
        open_data(loaded, f"data.train.{place}.path", source.path, transform, objective)
        for place, source in enumerate(data.train)
    ]
    try:
        return BlendedDataset(parts, [source.weight for source in data.train])
    except UserError as error:
        raise loaded.source.error([("data.train", str(error))]) from None


def open_held_out(
    loaded: LoadedConfig, key: str, path: str, objective: Trainable, train: Samples
) -> ShardDataset:
    """Open images that are not trained on; raises also where their tokenizer is another."""
    dataset = open_data(loaded, key, path, evaluation_transform(loaded.config.data), objective)
    if dataset.manifest.identity != train.manifest.identity:
        kind = train.manifest.tokenizer_kind
        text = f"{path} was made with another {kind} than {train.directory}"
        raise loaded.source.error([(key, text)])
    return dataset
