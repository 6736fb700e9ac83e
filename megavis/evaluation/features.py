"""Features of a data set, one vector per image and layer, and their cache in a run folder.

Raw pixels are a baseline. The cache is keyed by a hash of everything that features depend on: a
safetensors file holds the features of one network and one view for the first images of a data set,
`layers` float32 `[L + 1, b, h]` and `labels` int64 `[b]`. Its name consists of the hash of the key
and the number of images; its header has the key in readable form.

Legend: b images, n tokens of an image, L blocks, h hidden size.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import sys
import time
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from megavis.checkpoint.format.tensor_reader import CheckpointReader
from megavis.config.errors import UserError
from megavis.config.schema import RunConfig
from megavis.data.format.files import write_atomically
from megavis.data.loading.blended_dataset import Samples
from megavis.data.loading.dataset import ShardDataset, Subset
from megavis.data.loading.loader import Batch, evaluation_batches
from megavis.tokenizers.palette import Palette

FOLDER = Path("evaluation") / "features"
"""Path in a run folder."""
_FORMAT = 2
"""Increment this when features change for the same key: files of another format are ignored."""
Key = Mapping[str, Any]
"""Everything that features depend on except the number of images, as JSON values."""


@dataclass(frozen=True)
class LabelledFeatures:
    """Features and labels for a linear classifier.

    Attributes:
        layers: float32 `[layers, b, width]`.
        labels: int64 `[b]`; -1 for images without a label, which `labelled` removes.
        further_views: shaped like `layers`, for the same images with other random draws (BERT's
            masks) in the inputs.
    """

    layers: np.ndarray
    labels: np.ndarray
    further_views: tuple[np.ndarray, ...] = ()

    @property
    def views(self) -> tuple[np.ndarray, ...]:
        """All views, `layers` first."""
        return (self.layers, *self.further_views)

    def subset(self, indices: np.ndarray) -> LabelledFeatures:
        """Return the images with indices int64 `[m]`."""
        first, *further = (view[:, indices] for view in self.views)
        return LabelledFeatures(first, self.labels[indices], tuple(further))

    @property
    def labelled(self) -> LabelledFeatures:
        """Return the images that have a label; `self` if all have one."""
        return self if (self.labels >= 0).all() else self.subset(np.flatnonzero(self.labels >= 0))

    def followed_by(self, other: LabelledFeatures) -> LabelledFeatures:
        """Return the images of both, first view only; `other`'s come last."""
        return LabelledFeatures(
            np.concatenate([self.layers, other.layers], axis=1),
            np.concatenate([self.labels, other.labels]),
        )

    def concatenated(self, chosen: Sequence[int]) -> LabelledFeatures:
        """Concatenate the features of the chosen layers into a single layer."""
        first, *further = (
            np.concatenate([view[layer] for layer in chosen], axis=1)[None] for view in self.views
        )
        return LabelledFeatures(first, self.labels, tuple(further))


def view_of(batch: Batch, number: int, dataset: Samples) -> Batch:
    """Return a batch of the data set with the random draws of another view; view 0 is the batch.

    Draws of an objective are functions of the sample index, so a view has the same images at later
    positions of the endless sample stream.
    """
    return dataclasses.replace(batch, sample_index=batch.sample_index + number * len(dataset))


def pixel_features(
    dataset: Samples,
    *,
    palette: Palette | None = None,
    limit: int | None = None,
    batch_size: int = 1024,
) -> LabelledFeatures:
    """Return the model's inputs after resize and crop; `layers` is `[1, b, width]`.

    These are the colours of palette tokens or the pixels of jpeg shards, both in [-1, 1], the means
    of latents, or unchanged frames. Images without a label are left out.

    Args:
        limit: maximum number of images, from the first.

    Raises:
        UserError: the shards hold ids, which cannot serve as pixels.
    """
    pixels, labels = [], []
    for batch in evaluation_batches(dataset, batch_size=batch_size, limit=limit):
        pixels.append(_quantities(batch.inputs.numpy(), dataset, palette).reshape(len(batch), -1))
        labels.append(batch.labels.numpy())
    return LabelledFeatures(np.concatenate(pixels)[None], np.concatenate(labels)).labelled


def _quantities(inputs: np.ndarray, dataset: Samples, palette: Palette | None) -> np.ndarray:
    kind = dataset.manifest.kind
    if kind == "palette":
        assert palette is not None
        return palette.centers[inputs]
    if kind == "jpeg":
        return inputs.astype(np.float32) / 127.5 - 1.0
    if kind == "latents":
        return inputs[:, 0].astype(np.float32)
    if kind == "recordings":
        return inputs
    raise UserError(
        f"{dataset.directory} holds {kind}, which cannot serve as pixels: use jpeg shards"
        " of the same images"
    )


@dataclass
class FeatureCache:
    """Features cached in a run folder."""

    folder: Path
    num_read: int = 0
    num_computed: int = 0
    seconds: float = 0.0
    _is_writable: bool = field(default=True, repr=False)

    def read(self, key: Key, num_images: int) -> LabelledFeatures | None:
        """Return the features of the first `num_images` images, or None if they are not cached.

        Truncated or damaged files are ignored. The arrays are memory-mapped.
        """
        for path, count in self._files(key):
            if count >= num_images and (found := _open(path, key)) is not None:
                self.num_read += 1
                return LabelledFeatures(found.layers[:, :num_images], found.labels[:num_images])
        return None

    def write(self, key: Key, features: LabelledFeatures) -> None:
        """Cache features atomically, and delete caches of fewer images with the same key.

        If the run folder is not writable, a warning is printed once and nothing is cached.
        """
        if not self._is_writable:
            return
        path = self.folder / f"{_name(key)}-{len(features.labels)}.safetensors"
        tensors = {"layers": np.ascontiguousarray(features.layers), "labels": features.labels}
        # In one metadata entry: safetensors writes several in varying order.
        about = {"key": key, "crc32": _checksum(features)}
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            write_atomically(path, save(tensors, metadata={"about": json.dumps(about)}))
            for other, count in self._files(key):
                if count < len(features.labels):
                    other.unlink(missing_ok=True)
        except OSError as error:
            self._is_writable = False
            sys.stderr.write(f"features are not kept: {self.folder}: {error.strerror}\n")

    @contextlib.contextmanager
    def timed(self) -> Iterator[None]:
        """Count and time the features computed in the block."""
        start = time.monotonic()
        yield
        self.num_computed += 1
        self.seconds += time.monotonic() - start

    def report(self) -> str:
        """Return a line on how many feature sets were read and computed."""
        computed = f"{self.num_computed} sets computed in {self.seconds:.1f} s"
        return f"features: {computed}, {self.num_read} read from {self.folder}"

    def _files(self, key: Key) -> list[tuple[Path, int]]:
        """Return the files of a key and how many images each has, the smallest first."""
        paths = self.folder.glob(f"{_name(key)}-*.safetensors")
        return sorted(
            ((path, int(path.stem.rpartition("-")[2])) for path in paths), key=itemgetter(1)
        )


def identity_of_network(
    config: RunConfig, checkpoint: Path | None, *, dtype: torch.dtype, tokenizer: str | None
) -> Key:
    """Return everything that a network's features depend on except the images.

    Args:
        config: config of the run, including its seed: random masks and fresh weights depend on it.
        checkpoint: folder of the weights; None for freshly initialized ones.
        tokenizer: SHA-256 of the tokenizer that encodes images on the fly, if any.

    Raises:
        UserError: the checkpoint's manifest is missing or damaged.
    """
    weights = "fresh"
    if checkpoint is not None:
        with CheckpointReader(checkpoint) as reader:
            weights = reader.weights_sha256()
    # The tokenizer is identified by its hash, not by its path.
    objective = config.objective.model_dump(mode="json", exclude={"tokenizer"})
    return {
        "format": _FORMAT,
        "torch": torch.__version__,
        "weights": weights,
        "precision": str(dtype).removeprefix("torch."),
        "seed": config.seed,
        "objective": objective,
        "tokenizer": tokenizer,
        "model": config.model.model_dump(mode="json"),
        "finetune": config.finetune and config.finetune.model_dump(mode="json"),
        "image_size": config.data.image_size,
    }


def identity_of_data(dataset: ShardDataset | Subset) -> Key:
    """Return everything that the images and labels of a data set depend on."""
    if isinstance(dataset, Subset):
        chosen = hashlib.sha256(dataset.indices.astype("<i8").tobytes()).hexdigest()
        return {**identity_of_data(dataset.dataset), "chosen": chosen}
    digest = hashlib.sha256()
    for shard in dataset.manifest.shards:
        # Labels are in the index.
        digest.update(f"{shard.sha256} {shard.index_sha256}\n".encode())
    return {"shards": digest.hexdigest(), "transform": repr(dataset.transform)}


@dataclass(frozen=True)
class CachedFile:
    """One file of features.

    Attributes:
        key: key of its features; None if the file is damaged.
        shape: `(L + 1, b, h)`.
    """

    path: Path
    key: Key | None
    shape: tuple[int, ...]


def cached_features(run_folder: Path) -> list[CachedFile]:
    """Return the cached files of a run folder, sorted by path; reads no features."""
    found = []
    for path in sorted((run_folder / FOLDER).glob("*.safetensors")):
        about, shape = _about(path), ()
        if about is not None:
            with safe_open(path, framework="pt") as file:
                shape = tuple(file.get_slice("layers").get_shape())
        found.append(CachedFile(path, about and about["key"], shape))
    return found


def clear_features(run_folder: Path) -> int:
    """Delete all cached features of a run folder; return the freed bytes. Raises OSError."""
    total = 0
    # Hidden files were left by killed processes.
    for path in (run_folder / FOLDER).glob("*safetensors*"):
        total += path.stat().st_size
        path.unlink()
    return total


def _name(key: Key) -> str:
    return hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:32]


def _checksum(features: LabelledFeatures) -> int:
    start = zlib.crc32(np.ascontiguousarray(features.layers).data)
    return zlib.crc32(np.ascontiguousarray(features.labels).data, start)


def _about(path: Path) -> dict[str, Any] | None:
    """Return the content of the header, or None if the file is damaged."""
    try:
        with safe_open(path, framework="pt") as file:
            return json.loads(file.metadata()["about"])
    except (OSError, SafetensorError, KeyError, TypeError, ValueError):
        return None


def _open(path: Path, key: Key) -> LabelledFeatures | None:
    """Return the memory-mapped features, or None if the file is damaged or has another key."""
    about = _about(path)
    if about is None or about["key"] != json.loads(json.dumps(key)):
        return None
    with safe_open(path, framework="pt") as file:
        layers, labels = (file.get_tensor(name).numpy() for name in ("layers", "labels"))
    found = LabelledFeatures(layers, labels)
    return found if _checksum(found) == about["crc32"] else None
