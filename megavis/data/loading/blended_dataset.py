"""Blend several shard folders into one data set, each with its own weight."""

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


class BlendedDataset:
    """The concatenated samples of several shard folders.

    Classes are merged by name: the first folder's keep their labels, new ones follow.

    Args:
        weights: relative weight of each in training; see `BlendedOrder`.

    Attributes:
        class_names, labels: see `Samples`.
        manifest: the first folder's, with the shards and classes of all folders.

    Raises:
        UserError: two manifests disagree, or a weight is too small compared with the others.
    """

    def __init__(self, parts: Sequence[ShardDataset], weights: Sequence[float]) -> None:
        self.parts = tuple(parts)
        self._weights = tuple(weights)
        for part in self.parts:
            part.num_parts = len(self.parts)
            _check_alike(self.parts[0], part)
        try:
            block_counts(weights)
        except ValueError as error:
            raise UserError(str(error)) from None
        names = dict.fromkeys(name for part in self.parts for name in part.class_names)
        self.class_names = tuple(names)
        self._label_tables = [
            _label_table(part.class_names, self.class_names) for part in self.parts
        ]
        self._firsts = np.cumsum([0, *map(len, self.parts)])
        shards = tuple(shard for part in self.parts for shard in part.manifest.shards)
        self.manifest = self.parts[0].manifest.model_copy(
            update={"class_names": self.class_names, "shards": shards}
        )

    @property
    def labels(self) -> np.ndarray:
        """Labels int64 `[N]`, as indices of `class_names`; not cached."""
        parts = zip(self._label_tables, self.parts, strict=True)
        return np.concatenate([table[part.labels] for table, part in parts])

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
        """`folder/shard:key: reason` of each sample replaced so far."""
        return [f"{part.directory}/{name}" for part in self.parts for name in part.skipped_names]

    def __len__(self) -> int:
        return int(self._firsts[-1])

    def order(self, seed: int) -> BlendedOrder:
        """Return the training order."""
        return BlendedOrder([part.order for part in self.parts], self._weights, seed=seed)

    def read(
        self, indices: np.ndarray, *, positions: np.ndarray | None = None
    ) -> tuple[np.ndarray, np.ndarray]:
        """Read samples; see `ShardDataset.read`. Replacements come from the same folder."""
        indices = checked_indices(indices, len(self))
        positions = indices if positions is None else positions
        sources = np.searchsorted(self._firsts, indices, side="right") - 1
        rows = [np.flatnonzero(sources == number) for number in range(len(self.parts))]
        samples, labels = [], []
        for number, part in enumerate(self.parts):
            part_rows = rows[number]
            part_samples, part_labels = part.read(
                indices[part_rows] - self._firsts[number], positions=positions[part_rows]
            )
            samples.append(part_samples)
            labels.append(self._label_tables[number][part_labels])
        # Read source by source, then restore the requested order.
        inverse = np.argsort(np.concatenate(rows))
        return np.concatenate(samples)[inverse], np.concatenate(labels)[inverse]


class Samples(Protocol):
    """A data set: `ShardDataset`, a subset, or a blend.

    Attributes:
        directory: the shard folder; the first one of a blend.
        manifest: description of the samples.
        class_names: names of the classes, indexed by label.
        labels: int64 `[N]`, -1 for a sample without a label.
        skipped: number of replaced samples by reason.
        skipped_names: `shard:key: reason` of each sample replaced so far.
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
        """Return the training order."""

    def read(
        self, indices: np.ndarray, *, positions: np.ndarray | None = None
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return samples `[b, ...]` and labels `[b]` of indices int64 `[b]`."""


def _label_table(names: Sequence[str], all_names: Sequence[str]) -> np.ndarray:
    """Map labels of `names` to labels of `all_names`, int64; the last entry maps -1 to -1."""
    labels = {name: label for label, name in enumerate(all_names)}
    return np.array([*(labels[name] for name in names), -1], np.int64)


def _check_alike(first: ShardDataset, other: ShardDataset) -> None:
    for key, here, there in _differences(first.manifest, other.manifest):
        raise UserError(
            f"{other.directory / MANIFEST_NAME}: {key} is {there}, and"
            f" {first.directory / MANIFEST_NAME} has {here}: only equal forms can be blended"
        )


def _differences(one: Manifest, other: Manifest) -> Iterator[tuple[str, object, object]]:
    keys = ["kind", "image_size", "num_tokens", "latent_shape", "frame_shape", "target"]
    if one.kind == "jpeg":
        keys.remove("image_size")  # images of any size are cropped to one size when read
    pairs = [(key, getattr(one, key), getattr(other, key)) for key in keys]
    pairs.append(("tokenizer.sha256", one.identity, other.identity))
    yield from (pair for pair in pairs if pair[1] != pair[2])
