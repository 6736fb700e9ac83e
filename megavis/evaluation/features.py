"""Features of a data set: one vector an image and layer, and raw pixels as a baseline.

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
    """What a linear classifier sees.

    Attributes:
        layers: float32 `[layers, b, width]`.
        labels: int64 `[b]`; -1 where there is none, until `labelled` leaves these out.
        further_views: each like `layers`, of the same images with other random draws (BERT's
            masks) in the inputs.
    """

    layers: np.ndarray
    labels: np.ndarray
    further_views: tuple[np.ndarray, ...] = ()

    @property
    def views(self) -> tuple[np.ndarray, ...]:
        """All draws of the inputs, `layers` first."""
        return (self.layers, *self.further_views)

    def subset(self, indices: np.ndarray) -> LabelledFeatures:
        """Return the images `indices`, int64 `[m]`, alone."""
        first, *further = (view[:, indices] for view in self.views)
        return LabelledFeatures(first, self.labels[indices], tuple(further))

    @property
    def labelled(self) -> LabelledFeatures:
        """The images that have a label; the same object where all have one."""
        return self if (self.labels >= 0).all() else self.subset(np.flatnonzero(self.labels >= 0))

    def followed_by(self, other: LabelledFeatures) -> LabelledFeatures:
        """Return the images of both, in one view each; the other's come last."""
        return LabelledFeatures(
            np.concatenate([self.layers, other.layers], axis=1),
            np.concatenate([self.labels, other.labels]),
        )

    def concatenated(self, chosen: Sequence[int]) -> LabelledFeatures:
        """Return features of one layer: those of the chosen layers side by side."""
        first, *further = (
            np.concatenate([view[layer] for layer in chosen], axis=1)[None] for view in self.views
        )
        return LabelledFeatures(first, self.labels, tuple(further))


def view_of(batch: Batch, number: int, dataset: Readable) -> Batch:
    """Return a batch of the data set with the random draws of another view; view 0 is its own.

    Every draw of an objective is a function of the sample's index, so a view is the same image
    further on in the endless stream of samples.
    """
    return dataclasses.replace(batch, sample_index=batch.sample_index + number * len(dataset))


def pixel_features(
    dataset: ShardDataset,
    *,
    palette: Palette | None = None,
    limit: int | None = None,
    batch_size: int = 1024,
) -> LabelledFeatures:
    """Return what the model itself is given, after resize and crop; `layers` is `[1, b, width]`.

    Of palette shards the colours of the tokens and of jpeg shards the pixels, both in
    [-1, 1]; of latents the means, and frames as they are.

    Args:
        dataset: images; those without a label are left out.
        palette: of palette shards.
        limit: only the first so many.
        batch_size: images read at once.

    Raises:
        UserError: the shards hold ids, which are no quantities.
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
    if kind == "frames":
        return inputs.astype(np.float32)
    raise UserError(
        f"{dataset.directory} holds {kind}, which no classifier takes for pixels: name jpeg shards"
        " of the same images"
    )


def _batches(dataset: Readable, *, limit: int | None, batch_size: int) -> Iterator[Batch]:
    return evaluation_batches(dataset, batch_size=batch_size, limit=limit)
