"""Features of a network by layer, computed once by all processes of a job and cached.

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
from megavis.data.loading.dataset import ShardDataset
from megavis.data.loading.loader import round_robin_batches
from megavis.evaluation.feature_cache import FeatureCache, identity_of_data
from megavis.evaluation.features import LabelledFeatures, view_of
from megavis.model.inference import Inference
from megavis.parallel.context import ParallelContext

NOTHING = LabelledFeatures(np.empty((0, 0, 0), np.float32), np.empty(0, np.int64))
"""What the other processes of a job get."""

NUM_VIEWS = 5
"""Independent masks of an image, of which the commonest answer counts (iGPT, section 4.6)."""


@dataclass(frozen=True)
class Network:
    """A network whose features are asked for.

    Every process of a job asks together. The main one gets the features, the others none: they
    would take memory, and nothing is fitted there.

    Attributes:
        objective: the paper.
        context: ranks and groups of this process.
        build: gives what runs the network; called only when something has to be computed.
        cache: where features are kept; None: nowhere.
        identity: all that its features depend on besides the images, JSON values; wanted with a
            cache.
    """

    objective: Trainable
    context: ParallelContext
    build: Callable[[], Inference]
    cache: FeatureCache | None = None
    identity: Mapping[str, Any] | None = None

    @classmethod
    def of(cls, runner: Inference, objective: Trainable) -> Network:
        """Return a network that runs already, whose features are kept nowhere."""
        return cls(objective, runner.context, lambda: runner)

    @cached_property
    def runner(self) -> Inference:
        """What runs the network."""
        return self.build()

    @property
    def num_views(self) -> int:
        """How often an image is looked at: 5 times where its inputs hold random draws."""
        return NUM_VIEWS if self.objective.backbone.has_random_features else 1

    def features(
        self, dataset: ShardDataset, *, limit: int | None = None, num_views: int = 1
    ) -> LabelledFeatures:
        """Return f^l = mean over tokens of n^l for l = 0 .. L (iGPT, section 2.4).

        A BERT model's inputs are masked as in training, each image by a mask of its own, "to keep
        inputs in-distribution" (section 4.6).

        Args:
            dataset: images; those without a label are left out.
            limit: only the first so many.
            num_views: independent random draws for the inputs of each image.

        Returns:
            `layers` is `[L + 1, b, h]`, on the main process.
        """
        count = len(dataset) if limit is None else min(limit, len(dataset))
        first, *further = (self._view(dataset, number, count) for number in range(num_views))
        views = tuple(view.layers for view in further)
        return LabelledFeatures(first.layers, first.labels, views).labelled

    def _view(self, dataset: ShardDataset, number: int, count: int) -> LabelledFeatures:
        """Return one draw of the inputs: from the cache, or computed and kept there."""
        cache = self.cache
        if cache is None:
            return extract(self.runner, self.objective, dataset, view=number, num_images=count)
        assert self.identity is not None
        key = {**self.identity, **identity_of_data(dataset), "view": number}
        kept = cache.read(key, count) if self.context.is_main else None
        if self._main_says(kept is not None):
            return kept or NOTHING
        with cache.timed():
            found = extract(self.runner, self.objective, dataset, view=number, num_images=count)
        if self.context.is_main:
            cache.write(key, found)
        return found

    def _main_says(self, answer: bool) -> bool:
        """Return the main process's answer: the others may not see its disk."""
        if self.context.world.size == 1:
            return answer
        flag = torch.tensor(int(answer), device=self.context.device)
        dist.broadcast(flag, src=0, group=self.context.world.group)
        return bool(flag)


def extract(
    runner: Inference,
    objective: Trainable,
    dataset: ShardDataset,
    *,
    num_images: int,
    view: int = 0,
    batch_size: int = 64,
) -> LabelledFeatures:
    """Compute the features of the first `num_images` images, in one view.

    Every process of the job calls this. Data-parallel ranks take turns at the very batches that
    one process would compute, so that the numbers are the same.

    Args:
        runner: the network.
        objective: the paper.
        dataset: images, with labels or without.
        num_images: at most as many as there are.
        view: which random draw of the inputs; see `view_of`.
        batch_size: images of one forward pass.

    Returns:
        `layers` is `[L + 1, num_images, h]`, of images without a label too; nothing on other
        processes than the main one.
    """
    context = runner.context
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
            runner.features(objective.backbone.feature_inputs(batch)), 1, batch_size, context
        )
        named = _gather(batch.labels, 0, batch_size, context)
        if context.is_main:
            layers += [part.cpu() for part in pooled]
            labels += [part.cpu() for part in named]
    if not context.is_main:
        return NOTHING
    # Only the last batch is short; what follows it are copies of it by later ranks.
    every = torch.cat(layers, dim=1)[:, :num_images]
    return LabelledFeatures(every.numpy(), torch.cat(labels)[:num_images].numpy())


def _gather(mine: Tensor, dimension: int, size: int, context: ParallelContext) -> list[Tensor]:
    """Return what each data-parallel rank has, padded to `size` along one dimension."""
    if context.data.size == 1:
        return [mine]
    missing = [0, 0] * (mine.ndim - 1 - dimension) + [0, size - mine.shape[dimension]]
    padded = F.pad(mine, missing).contiguous()
    parts = [torch.empty_like(padded) for _ in range(context.data.size)]
    dist.all_gather(parts, padded, group=context.data.group)
    return parts
