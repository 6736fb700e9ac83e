"""GVP: Bridging Autoregressive and Masked Modeling for Enhanced Visual Representation Learning.

An image is put in a random order and cut into groups of random length; each group is predicted from
those before it. A content stream encodes the tokens, a query stream knows only where they stand and
predicts them; both share all weights (section 4.2). Who sees whom follows from the groups alone
(section 4.3), so that masked modelling (one predicted group) and autoregressive modelling (a group
for each token) are two settings of one model.

p2p: patches in, pixels out; p2d: patches in, ids out; d2d: ids in and out (section 5).

Legend: b images, T patches, S condition tokens, K predicted groups, c content and q query tokens,
d numbers of a patch.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from megavis.config.choices import PositionKind
from megavis.data.batch import Batch
from megavis.data.manifest import Manifest
from megavis.model.flops import Workload
from megavis.model.init import Initialization, vision_transformer
from megavis.model.orders import take_places
from megavis.model.positions import carried_names
from megavis.model.visibility import Kind
from megavis.objectives.base import Sequence
from megavis.objectives.gvp_condition import PooledFeatures
from megavis.objectives.gvp_config import GVPConfig
from megavis.objectives.gvp_filling import FillsPatches
from megavis.objectives.gvp_grouping import Grouping
from megavis.objectives.gvp_layers import (
    TwoStreamEmbedding,
    TwoStreams,
    content_alone,
    raster,
    two_streams,
)
from megavis.objectives.image_tokens import Ids, Patches, Tokens


class GVP(FillsPatches):
    """Group after group, in any order."""

    config_type = GVPConfig

    @property
    def visibility_kind(self) -> Kind:
        """Content and query stream (section 4.2)."""
        return "two_stream"

    @property
    def position_kind(self) -> PositionKind:
        """Sin-cos as MAE has them, unless the config says otherwise; the paper names no kind."""
        return self.config.model.positions or "sincos"

    @property
    def carries(self) -> tuple[str, ...]:
        """Groups, and coordinates for rotary positions."""
        return ("content_groups", "query_groups", *carried_names(self.position_kind))

    @property
    def num_tokens(self) -> int:
        """Patches of an image."""
        return self.paper.num_patches(self.config)

    @property
    def num_outputs(self) -> int:
        """Numbers of a patch, or ids."""
        return self.predicted.num_outputs

    @functools.cached_property
    def content(self) -> Tokens:
        """What the model reads."""
        return self._ids() if self.paper.variant == "d2d" else self._patches()

    @functools.cached_property
    def predicted(self) -> Tokens:
        """What the model predicts."""
        return self._ids() if self.paper.variant == "p2d" else self.content

    @functools.cached_property
    def grouping(self) -> Grouping:
        """In which order tokens are predicted, and in which groups."""
        return Grouping(self.paper, num_tokens=self.num_tokens, seed=self.config.seed)

    def _patches(self) -> Patches:
        return Patches(
            image_size=self.config.data.image_size,
            patch_size=self.paper.patch_size,
            normalize=self.paper.normalize_targets,
        )

    @functools.cached_property
    def condition(self) -> PooledFeatures | None:
        """What y_extra is, where it is no learned vector."""
        paper = self.paper
        if paper.condition_size is None:
            return None
        assert paper.tokenizer is not None
        return PooledFeatures(
            image_size=self.config.data.image_size,
            size=paper.condition_size,
            tokenizer=paper.tokenizer,
        )

    def _conditions(self, images: Tensor) -> tuple[Tensor, ...]:
        """Return what the first layer takes besides both streams."""
        return () if self.condition is None else (self.condition.of(images),)

    def _ids(self) -> Ids:
        assert self.paper.vocabulary_size is not None
        return Ids(
            image_size=self.config.data.image_size,
            num_tokens=self.num_tokens,
            vocabulary_size=self.paper.vocabulary_size,
            tokenizer=self.paper.tokenizer,
        )

    def workload(self) -> Workload:
        """Return both streams; keys and values are those of content alone."""
        first, last = self.paper.bounds(self.config)
        seen, read = self.paper.num_condition_tokens + last, self.num_tokens - first
        if self.paper.streams == "one":
            return Workload(seen, seen, float(seen), seen, self.num_outputs)
        return Workload(seen + read, seen, float(seen), read, self.num_outputs)

    def check_data(self, manifest: Manifest) -> Iterator[str]:
        """Want photographs; d2d also takes the ids that they were made to."""
        if manifest.kind == "ids" and self.paper.variant == "d2d":
            assert isinstance(self.predicted, Ids)
            yield from self.predicted.check(manifest)
        elif manifest.kind != "jpeg":
            wanted = "jpeg or ids" if self.paper.variant == "d2d" else "jpeg"
            yield f"holds {manifest.kind} shards; gvp wants {wanted} shards"
        elif self.paper.variant == "d2d" and self.paper.tokenizer is None:
            yield "holds images; name what makes ids of them in objective.tokenizer"

    def initialization(self) -> Initialization:
        """Return MAE's, whose recipe section 5 follows."""
        return vision_transformer()

    def build_embedding(self) -> nn.Module:
        """Return the start of both streams."""
        return TwoStreamEmbedding(
            self.core,
            self.content.embedding(self.core),
            side=self.config.data.image_size // self.paper.patch_size,
            condition=self.paper.num_condition_tokens,
            positions=self.position_kind,
            condition_size=self.paper.condition_size,
        )

    def build_head(self) -> nn.Module:
        """Return the last norm and the map to pixels or to logits."""
        return self.predicted.head(self.core)

    def sequence(self, batch: Batch) -> Sequence:
        """Draw order and groups, and ask for what they predict."""
        content = predicted = self.content.of(batch.inputs)
        if self.predicted is not self.content:
            predicted = self.predicted.of(batch.inputs)
        order, groups = self.grouping.draw(batch.sample_index)
        first, _ = self.paper.bounds(self.config)
        asked, asked_groups = order[:, first:], groups[:, first:]
        inputs = (*self._streams(content, order, groups), *self._conditions(batch.inputs))
        return Sequence(inputs, (take_places(predicted, asked), asked_groups))

    def _streams(self, content: Tensor, order: Tensor, groups: Tensor) -> TwoStreams:
        """Return what the first layer takes, nothing that no loss reads among it."""
        first, last = self.paper.bounds(self.config)
        seen, seen_groups = order[:, :last], groups[:, :last]
        if self.paper.streams == "one":
            return content_alone(content, seen, seen_groups)
        return two_streams(content, seen, seen_groups, order[:, first:], groups[:, first:])

    @property
    def has_random_sequence(self) -> bool:
        """Orders are drawn, or boundaries of groups."""
        paper = self.paper
        return paper.order == "random" or paper.segmentation in ("random", "mixed")

    def inputs_for_features(
        self, inputs: Tensor, sample_index: Tensor | None
    ) -> tuple[Tensor, ...]:
        """Return the content stream alone, in raster order, with the causal mask kept.

        "For linear probing, we keep the causal mask to maintain the same feature distribution"
        (section 5); the groups are typical ones of training, without a draw.
        """
        content = self.content.of(inputs)
        order = raster(content, self.num_tokens)
        streams = content_alone(content, order, self.grouping.typical(order))
        return (*streams, *self._conditions(inputs))

    def inputs_from(
        self,
        inputs: Any,
        *,
        order: Tensor | None = None,
        boundaries: Any = None,
        sample_index: Tensor | None = None,
        **_: Any,
    ) -> tuple[Tensor, ...]:
        """Return both streams, with a query for every patch in the order of z.

        Args:
            inputs: images uint8 `[b, h, w, 3]`, or for d2d ids `[b, T]`.
            order: z, int64 `[b, T]`, patches in raster order; drawn where absent.
            boundaries: n_0 .. n_{K-1}, for all images alike; drawn where absent.
            sample_index: int64 `[b]`, decides the draws; 0 .. b - 1 where absent.

        Raises:
            UserError: the order is no permutation, the boundaries do not increase, or an id is none
                of the codebook's.
        """
        content = self.content.of(inputs)
        if isinstance(self.content, Ids):
            self.content.check_ids(content)
        index = torch.arange(len(content)) if sample_index is None else sample_index
        order, groups = self.grouping.chosen(index.to(content.device), order, boundaries)
        if self.paper.streams == "one":
            streams = self._streams(content, order, groups)
        else:
            streams = two_streams(content, order, groups, order, groups)
        return (*streams, *self._conditions(inputs))

    def loss(self, predictions: Tensor, targets: tuple[Tensor, ...]) -> Tensor:
        """Return the error of a token, the mean over the predicted tokens of each image.

        Equation (6): the tokens of G_0 are given and count nothing.

        Args:
            predictions: as `build_head` gives them.
            targets: tokens `[b, q, ...]` and their groups `[b, q]`.
        """
        tokens, groups = targets
        errors = self.predicted.errors(self._asked(predictions), tokens, self.core)
        predicted = (groups > 0).float()
        return ((errors * predicted).sum(1) / predicted.sum(1)).mean()

    def outputs(self, predictions: Tensor) -> Tensor:
        """Return patches `[b, q, d]` or logits `[b, q, v]`, in the order of z."""
        return self.predicted.outputs(self._asked(predictions), self.core)

    def _asked(self, predictions: Tensor) -> Tensor:
        """Leave out what condition tokens before the last would predict in one stream."""
        return predictions[:, -self.num_tokens :] if self.paper.streams == "one" else predictions

    @functools.cached_property
    def tokenizer_identity(self) -> str | None:
        """SHA-256 of the tokenizer of images."""
        if self.paper.tokenizer is None:
            return None
        source = self.condition or self.predicted
        assert isinstance(source, Ids | PooledFeatures)
        return source.tokenizer.identity()
