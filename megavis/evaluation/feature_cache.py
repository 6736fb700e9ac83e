"""Cache features on disk under a hash of everything they depend on.

One safetensors file holds one network's features of one view of the first images of a data set:
`layers` float32 `[L + 1, b, h]` and `labels` int64 `[b]`. Its name is the hash of the key and the
number of images, and its header has the key itself, to be read by people.

Legend: b images, L blocks, h hidden size.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import sys
import time
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from megavis.checkpoint.format.tensor_reader import CheckpointReader
from megavis.config.schema import RunConfig
from megavis.data.format.files import write_atomically
from megavis.data.loading.dataset import ShardDataset
from megavis.evaluation.features import LabelledFeatures

FOLDER = Path("evaluation") / "features"
"""In a run folder."""
_FORMAT = 2
"""To be raised when the same key would mean other features: files of another one are not found."""

Key = Mapping[str, Any]
"""All that features depend on but how many images there are, as JSON values."""


def identity_of_network(
    config: RunConfig, checkpoint: Path | None, *, dtype: torch.dtype, tokenizer: str | None
) -> Key:
    """Return all that a network's features depend on besides the images.

    Args:
        config: of the run. Its seed counts: random masks, and fresh weights, follow from it.
        checkpoint: folder of the weights; None: fresh ones.
        dtype: of the weights.
        tokenizer: SHA-256 of what makes tokens of images as they are read.

    Raises:
        UserError: the checkpoint's manifest is missing or damaged.
    """
    weights = "fresh"
    if checkpoint is not None:
        with CheckpointReader(checkpoint) as reader:
            weights = reader.weights_sha256()
    # A path says nothing about what lies there; the hash of the tokenizer does.
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


def identity_of_data(dataset: ShardDataset) -> Key:
    """Return all that the images and labels of a data set depend on."""
    digest = hashlib.sha256()
    for shard in dataset.manifest.shards:
        # The labels are in the index.
        digest.update(f"{shard.sha256} {shard.index_sha256}\n".encode())
    return {"shards": digest.hexdigest(), "transform": repr(dataset.transform)}


@dataclass
class FeatureCache:
    """The features that a run folder keeps.

    Attributes:
        folder: of the files.
        num_read: how often features were found there.
        num_computed: how often not.
        seconds: for which they were computed.
    """

    folder: Path
    num_read: int = 0
    num_computed: int = 0
    seconds: float = 0.0
    _is_writable: bool = field(default=True, repr=False)

    def read(self, key: Key, num_images: int) -> LabelledFeatures | None:
        """Return the features of the first `num_images` images; None where they are not there.

        A file that is torn or damaged is not used. The arrays are maps of the file, not in memory.
        """
        for path, count in self._files(key):
            if count >= num_images and (found := _open(path, key)) is not None:
                self.num_read += 1
                return LabelledFeatures(found.layers[:, :num_images], found.labels[:num_images])
        return None

    def write(self, key: Key, features: LabelledFeatures) -> None:
        """Keep features, whole or not at all; fewer images of the same key are dropped.

        A run folder that cannot be written to is reported once, and nothing is kept.
        """
        if not self._is_writable:
            return
        path = self.folder / f"{_name(key)}-{len(features.labels)}.safetensors"
        tensors = {"layers": np.ascontiguousarray(features.layers), "labels": features.labels}
        # All in one entry: safetensors writes several in another order each time.
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
        """Count what is computed in the block."""
        start = time.monotonic()
        yield
        self.num_computed += 1
        self.seconds += time.monotonic() - start

    def report(self) -> str:
        """Say in one line what was read and what was computed."""
        computed = f"{self.num_computed} sets computed in {self.seconds:.1f} s"
        return f"features: {computed}, {self.num_read} read from {self.folder}"

    def _files(self, key: Key) -> list[tuple[Path, int]]:
        """Return the files of a key and how many images each has, the smallest first."""
        paths = self.folder.glob(f"{_name(key)}-*.safetensors")
        return sorted(((path, int(path.stem.rpartition("-")[2])) for path in paths), key=_count)


@dataclass(frozen=True)
class CachedFile:
    """One file of features.

    Attributes:
        path: of the file.
        key: what its features are of; None where it is damaged.
        shape: `(L + 1, b, h)`.
    """

    path: Path
    key: Key | None
    shape: tuple[int, ...]


def cached_features(run_folder: Path) -> list[CachedFile]:
    """Return what a run folder keeps, sorted by path; reads no features."""
    return [_describe(path) for path in sorted((run_folder / FOLDER).glob("*.safetensors"))]


def _describe(path: Path) -> CachedFile:
    about = _about(path)
    if about is None:
        return CachedFile(path, None, ())
    with safe_open(path, framework="pt") as file:
        return CachedFile(path, about["key"], tuple(file.get_slice("layers").get_shape()))


def clear_features(run_folder: Path) -> int:
    """Delete all that a run folder keeps of features; returns the bytes. Raises OSError."""
    total = 0
    # Hidden ones are what a killed process has left.
    for path in (run_folder / FOLDER).glob("*safetensors*"):
        total += path.stat().st_size
        path.unlink()
    return total


def _name(key: Key) -> str:
    return hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:32]


def _count(entry: tuple[Path, int]) -> int:
    return entry[1]


def _checksum(features: LabelledFeatures) -> int:
    start = zlib.crc32(np.ascontiguousarray(features.layers).data)
    return zlib.crc32(np.ascontiguousarray(features.labels).data, start)


def _about(path: Path) -> dict[str, Any] | None:
    """Return what the header says; None where the file is damaged."""
    try:
        with safe_open(path, framework="pt") as file:
            about: dict[str, Any] = json.loads(file.metadata()["about"])
            return about
    except (OSError, SafetensorError, KeyError, TypeError, ValueError):
        return None


def _open(path: Path, key: Key) -> LabelledFeatures | None:
    """Return what a file holds, mapped; None where it is damaged or of another key."""
    about = _about(path)
    if about is None or about["key"] != json.loads(json.dumps(key)):
        return None
    with safe_open(path, framework="pt") as file:
        layers, labels = (file.get_tensor(name).numpy() for name in ("layers", "labels"))
    found = LabelledFeatures(layers, labels)
    return found if _checksum(found) == about["crc32"] else None
