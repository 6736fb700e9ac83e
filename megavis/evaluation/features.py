"""Features of a data set: one vector per image and layer, and raw pixels as a baseline.

Legend: b images, n tokens of an image, L blocks, h hidden size.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from megavis.config.errors import UserError
from megavis.data.loading.batch import Batch
from megavis.data.loading.dataset import ShardDataset
from megavis.data.loading.loader import Readable, evaluation_batches
from megavis.tokenizers.palette import Palette


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
        """Return the images of both, first view only; those of `other` come last."""
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


def view_of(batch: Batch, number: int, dataset: Readable) -> Batch:
    """Return a batch of the data set with the random draws of another view; view 0 is the batch.

    Draws of an objective are functions of the sample index, so a view has the same images at later
    positions of the endless sample stream.
    """
    return dataclasses.replace(batch, sample_index=batch.sample_index + number * len(dataset))


def pixel_features(
    dataset: ShardDataset,
    *,
    palette: Palette | None = None,
    limit: int | None = None,
    batch_size: int = 1024,
) -> LabelledFeatures:
    """Return the model's inputs after resize and crop; `layers` is `[1, b, width]`.

    These are the colours of palette tokens or the pixels of jpeg shards, both in [-1, 1], the means
    of latents, or unchanged frames.

    Args:
        dataset: images; those without a label are left out.
        palette: of palette shards.
        limit: maximum number of images, from the first.
        batch_size: images per read.

    Raises:
        UserError: the shards hold ids, which are not quantities.
    """
    pixels, labels = [], []
    for batch in _batches(dataset, limit=limit, batch_size=batch_size):
        pixels.append(_quantities(batch.inputs.numpy(), dataset, palette).reshape(len(batch), -1))
        labels.append(batch.labels.numpy())
    return LabelledFeatures(np.concatenate(pixels)[None], np.concatenate(labels)).labelled


def _quantities(inputs: np.ndarray, dataset: ShardDataset, palette: Palette | None) -> np.ndarray:
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


def _batches(dataset: Readable, *, limit: int | None, batch_size: int) -> Iterator[Batch]:
    return evaluation_batches(dataset, batch_size=batch_size, limit=limit)
