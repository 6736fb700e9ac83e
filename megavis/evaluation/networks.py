"""Compute the features of a network by layer, on all processes of a job, with a cache.

Legend: b images, L blocks, h hidden size.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from megavis.composition.trainable import Trainable
from megavis.data.loading.dataset import ShardDataset, Subset
from megavis.data.loading.loader import round_robin_batches
from megavis.evaluation.features import FeatureCache, LabelledFeatures, identity_of_data, view_of
from megavis.model.inference import Inference
from megavis.parallel.context import ParallelContext

NOTHING = LabelledFeatures(np.empty((0, 0, 0), np.float32), np.empty(0, np.int64))
"""Result on all processes but the main one."""

NUM_VIEWS = 5
"""Independent masks per image for the majority vote (iGPT, section 4.6)."""


@dataclass(frozen=True)
class Network:
    """A network for feature extraction.

    Its methods are collective over all processes of a job. Only the main process gets the features,
    to save memory, since classifiers are fitted only there.

    Attributes:
        build: builds the `Inference`; called only if features have to be computed.
        identity: everything that its features depend on except the images, as JSON values;
            needed with a cache.
    """

    objective: Trainable
    context: ParallelContext
    build: Callable[[], Inference]
    cache: FeatureCache | None = None
    identity: Mapping[str, Any] | None = None

    @cached_property
    def inference(self) -> Inference:
        """The `Inference`, built on first use."""
        return self.build()

    @property
    def num_views(self) -> int:
        """Views per image: 5 if inputs are random, else 1."""
        return NUM_VIEWS if self.objective.backbone.has_random_features else 1

    def features(
        self, dataset: ShardDataset | Subset, *, limit: int | None = None, num_views: int = 1
    ) -> LabelledFeatures:
        """Return f^l = mean over tokens of n^l for l = 0 .. L (iGPT, section 2.4).

        A BERT model's inputs are masked as in training, each image with its own mask, "to keep
        inputs in-distribution" (section 4.6). Images without a label are left out.

        Args:
            limit: maximum number of images, from the first.
            num_views: independent random draws of each image's inputs.

        Returns:
            On the main process, `layers` is `[L + 1, b, h]`.
        """
        count = len(dataset) if limit is None else min(limit, len(dataset))
        first, *further = (self._view(dataset, number, count) for number in range(num_views))
        views = tuple(view.layers for view in further)
        return LabelledFeatures(first.layers, first.labels, views).labelled

    def _view(self, dataset: ShardDataset | Subset, number: int, count: int) -> LabelledFeatures:
        """Return the features of one view from the cache, computing them if needed."""
        cache = self.cache
        if cache is None:
            return extract(self.inference, self.objective, dataset, view=number, num_images=count)
        assert self.identity is not None
        key = {**self.identity, **identity_of_data(dataset), "view": number}
        kept = cache.read(key, count) if self.context.is_main else None
        # Other processes may not share the main process's disk.
        if self.context.from_main(kept is not None):
            return kept or NOTHING
        with cache.timed():
            found = extract(self.inference, self.objective, dataset, view=number, num_images=count)
        if self.context.is_main:
            cache.write(key, found)
        return found


def extract(
    inference: Inference,
    objective: Trainable,
    dataset: ShardDataset | Subset,
    *,
    num_images: int,
    view: int = 0,
    batch_size: int = 64,
) -> LabelledFeatures:
    """Compute the features of the first `num_images` images in one view.

    Collective over all processes of the job. Data-parallel ranks take turns at the batches that a
    single process would compute, so the results are equal. For `view` see `view_of`.

    Returns:
        On the main process, `layers` is `[L + 1, num_images, h]`, including images without a label;
        elsewhere nothing.
    """
    objective.check_features()
    context = inference.context
    layers, labels = [], []
    for batch in round_robin_batches(
        dataset,
        batch_size=batch_size,
        num_samples=num_images,
        data_parallel_rank=context.data.rank,
        data_parallel_size=context.data.size,
    ):
        batch = view_of(batch.to(context.device), view, dataset)
        pooled = _gather(
            inference.features(objective.backbone.feature_inputs(batch)), 1, batch_size, context
        )
        named = _gather(batch.labels, 0, batch_size, context)
        if context.is_main:
            layers += [part.cpu() for part in pooled]
            labels += [part.cpu() for part in named]
    if not context.is_main:
        return NOTHING
    # Only the last batch is smaller; later ranks repeat it.
    every = torch.cat(layers, dim=1)[:, :num_images]
    return LabelledFeatures(every.numpy(), torch.cat(labels)[:num_images].numpy())


def _gather(mine: Tensor, dimension: int, size: int, context: ParallelContext) -> list[Tensor]:
    """All-gather over data-parallel ranks, padded to `size` along one dimension."""
    if context.data.size == 1:
        return [mine]
    missing = [0, 0] * (mine.ndim - 1 - dimension) + [0, size - mine.shape[dimension]]
    padded = F.pad(mine, missing).contiguous()
    parts = [torch.empty_like(padded) for _ in range(context.data.size)]
    dist.all_gather(parts, padded, group=context.data.group)
    return parts
