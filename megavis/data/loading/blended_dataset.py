"""Blend several shard folders into one data set, each with its share of the samples."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Protocol

import numpy as np

from megavis.config.errors import UserError
from megavis.data.format.manifest import MANIFEST_NAME, Manifest
from megavis.data.loading.dataset import ShardDataset, checked_indices
from megavis.data.loading.order import BlendedOrder, Order, block_counts


class Samples(Protocol):
    """What batches are made from: `ShardDataset`, or several of them mixed.

    Attributes:
        directory: the shard folder; of a mixture the first.
        manifest: what the samples are.
        class_names: names of the classes; a label indexes them.
        labels: int64 `[N]`, -1 where a sample has none.
        skipped: number of replaced samples by reason.
        skipped_names: `shard:key: reason` of each replaced sample met so far.
    """

    @property
    def directory(self) -> Path: ...  # noqa: D102 - see above
    @property
    def manifest(self) -> Manifest: ...  # noqa: D102 - see above
    @property
    def class_names(self) -> tuple[str, ...]: ...  # noqa: D102 - see above
    @property
    def labels(self) -> np.ndarray: ...  # noqa: D102 - see above
    @property
    def skipped(self) -> Counter[str]: ...  # noqa: D102 - see above
    @property
    def skipped_names(self) -> list[str]: ...  # noqa: D102 - see above

    def __len__(self) -> int: ...

    def order(self, seed: int) -> Order:
        """Return the order in which training sees the samples."""

    def read(
        self, indices: np.ndarray, *, positions: np.ndarray | None = None
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return samples `[b, ...]` and labels `[b]` of indices int64 `[b]`."""


class BlendedDataset:
    """The samples of several shard folders, one folder after another.

    Classes are known by name: those of the first folder keep their numbers, new ones follow.

    Args:
        parts: the folders, which must hold samples of one form.
        weights: share of each in training; see `BlendedOrder`.

    Attributes:
        parts: the folders.
        class_names, labels: as `Samples` has them.
        manifest: the first folder's, with the shards and classes of all.

    Raises:
        UserError: two manifests do not agree, or a weight is too small compared with the others.
    """

    def __init__(self, parts: Sequence[ShardDataset], weights: Sequence[float]) -> None:
        self.parts = tuple(parts)
        self._weights = tuple(weights)
        for part in self.parts[1:]:
            _check_alike(self.parts[0], part)
        try:
            block_counts(weights)
        except ValueError as error:
            raise UserError(str(error)) from None
        names = dict.fromkeys(name for part in self.parts for name in part.class_names)
        self.class_names = tuple(names)
        self._numbers = [_numbers(part.class_names, self.class_names) for part in self.parts]
        labels = [table[part.labels] for table, part in zip(self._numbers, self.parts, strict=True)]
        self.labels = np.concatenate(labels)
        self._firsts = np.cumsum([0, *map(len, self.parts)])
        shards = tuple(shard for part in self.parts for shard in part.manifest.shards)
        self.manifest = self.parts[0].manifest.model_copy(
            update={"class_names": self.class_names, "shards": shards}
        )

    @property
    def directory(self) -> Path:
        """The first folder."""
        return self.parts[0].directory

    @property
    def skipped(self) -> Counter[str]:
        """Number of replaced samples by reason, over all folders."""
        return sum((part.skipped for part in self.parts), Counter[str]())

    @property
    def skipped_names(self) -> list[str]:
        """`folder/shard:key: reason` of each replaced sample met so far."""
        return [f"{part.directory}/{name}" for part in self.parts for name in part.skipped_names]

    def __len__(self) -> int:
        return int(self._firsts[-1])

    def order(self, seed: int) -> BlendedOrder:
        """Return the order in which training sees the samples."""
        return BlendedOrder([len(part) for part in self.parts], self._weights, seed=seed)

    def read(
        self, indices: np.ndarray, *, positions: np.ndarray | None = None
    ) -> tuple[np.ndarray, np.ndarray]:
        """Read samples; arguments, results and errors are those of `ShardDataset.read`.

        A sample that is replaced is replaced by one of its own folder.
        """
        indices = checked_indices(indices, len(self))
        positions = indices if positions is None else positions
        sources = np.searchsorted(self._firsts, indices, side="right") - 1
        rows = [np.flatnonzero(sources == number) for number in range(len(self.parts))]
        samples, labels = [], []
        for number, part in enumerate(self.parts):
            mine = rows[number]
            read, its_labels = part.read(
                indices[mine] - self._firsts[number], positions=positions[mine]
            )
            samples.append(read)
            labels.append(self._numbers[number][its_labels])
        back = np.argsort(np.concatenate(rows))
        return np.concatenate(samples)[back], np.concatenate(labels)[back]


def _numbers(mine: Sequence[str], every: Sequence[str]) -> np.ndarray:
    """Return the place in `every` of each name in `mine`, int64; one more entry sends -1 to -1."""
    places = {name: place for place, name in enumerate(every)}
    return np.array([*(places[name] for name in mine), -1], np.int64)


def _check_alike(first: ShardDataset, other: ShardDataset) -> None:
    for key, here, there in _differences(first.manifest, other.manifest):
        raise UserError(
            f"{other.directory / MANIFEST_NAME}: {key} is {there}, and"
            f" {first.directory / MANIFEST_NAME} has {here}: only data of one form can be mixed"
        )


def _differences(one: Manifest, other: Manifest) -> Iterator[tuple[str, object, object]]:
    keys = ["kind", "image_size", "num_tokens", "latent_shape", "frame_shape", "target"]
    if one.kind == "jpeg":
        keys.remove("image_size")  # images of any size are cut to one when they are read
    pairs = [(key, getattr(one, key), getattr(other, key)) for key in keys]
    pairs.append(("tokenizer.sha256", one.identity, other.identity))
    yield from (pair for pair in pairs if pair[1] != pair[2])
