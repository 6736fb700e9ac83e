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

import dataclasses
import functools
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from megavis.composition.tokens import Ids, Patches, Tokens
from megavis.config.choices import PositionKind
from megavis.config.errors import UserError
from megavis.data.batch import Batch
from megavis.data.manifest import Manifest
from megavis.densities.categorical import Categorical
from megavis.densities.squared_error import SquaredError
from megavis.model.flops import Workload
from megavis.model.init import Initialization, normal, vision_transformer
from megavis.model.orders import take_places
from megavis.model.patches import TokenHead
from megavis.model.positions import carried_names
from megavis.model.visibility import Kind
from megavis.objectives.base import Objective, Sequence
from megavis.objectives.generates import Known
from megavis.objectives.gvp_condition import PooledFeatures
from megavis.objectives.gvp_config import GVPConfig
from megavis.objectives.gvp_grouping import Grouping
from megavis.objectives.gvp_layers import (
    TwoStreamEmbedding,
    TwoStreams,
    content_alone,
    two_streams,
)
from megavis.schedules.base import Arrangement, Step


class GVP(Objective):
    """Group after group, in any order."""

    config_type = GVPConfig
    usual_share = 0.25

    @property
    def paper(self) -> GVPConfig:
        """The paper's section of the config."""
        assert isinstance(self.config.objective, GVPConfig)
        return self.config.objective

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

    @functools.cached_property
    def density(self) -> Categorical | SquaredError:
        """A unit Gaussian of each number of a patch, or a categorical distribution of ids."""
        if isinstance(self.predicted, Ids):
            return Categorical(self.core, self.predicted.vocabulary_size, fill=normal(0.02))
        width = 3 * self.paper.patch_size**2
        return SquaredError(
            width,
            normalize=self.paper.normalize_targets,
            build_head=functools.partial(TokenHead, self.core, width),
        )

    @functools.cached_property
    def content(self) -> Tokens:
        """What the model reads."""
        return self._ids() if self.paper.variant == "d2d" else self._patches()

    @functools.cached_property
    def predicted(self) -> Tokens:
        """What the model predicts."""
        return self._ids() if self.paper.variant == "p2d" else self.content

    @functools.cached_property
    def schedule(self) -> Grouping:
        """In which order tokens are predicted, and in which groups."""
        bounds = self.paper.bounds(self.config)
        return Grouping(
            self.paper, num_tokens=self.num_tokens, bounds=bounds, seed=self.config.seed
        )

    def _patches(self) -> Patches:
        return Patches(
            image_size=self.config.data.image_size,
            patch_size=self.paper.patch_size,
        )

    @functools.cached_property
    def extra(self) -> PooledFeatures | None:
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
        return () if self.extra is None else (self.extra.of(images),)

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

    def sequence(self, batch: Batch) -> Sequence:
        """Draw order and groups, and ask for what they predict."""
        content = predicted = self.content.of(batch.inputs)
        if self.predicted is not self.content:
            predicted = self.predicted.of(batch.inputs)
        plan = self.schedule.draw(batch.sample_index)
        asked, asked_groups = plan.order[:, plan.first_asked :], plan.groups[:, plan.first_asked :]
        inputs = (*self._streams(content, plan), *self._conditions(batch.inputs))
        return Sequence(inputs, (take_places(predicted, asked), asked_groups))

    def _streams(self, tokens: Tensor, plan: Arrangement) -> TwoStreams:
        """Return what the first layer takes, nothing that no loss reads among it."""
        seen, groups = plan.order[:, : plan.num_content], plan.groups[:, : plan.num_content]
        content = take_places(tokens, seen)
        if self.paper.streams == "one":
            return content_alone(content, seen, groups)
        first = plan.first_asked
        return two_streams(content, seen, groups, plan.order[:, first:], plan.groups[:, first:])

    def inputs_for_features(
        self, inputs: Tensor, sample_index: Tensor | None
    ) -> tuple[Tensor, ...]:
        """Return the content stream alone, in raster order, with the causal mask kept.

        "For linear probing, we keep the causal mask to maintain the same feature distribution"
        (section 5); the groups are typical ones of training, without a draw.
        """
        content = self.content.of(inputs)
        plan = self.schedule.for_features(len(content), content.device)
        content = take_places(content, plan.order)
        return (*content_alone(content, plan.order, plan.groups), *self._conditions(inputs))

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
        plan = self.schedule.chosen(index.to(content.device), order, boundaries)
        if self.paper.streams == "two":
            plan = dataclasses.replace(plan, num_content=self.num_tokens, first_asked=0)
        streams = self._streams(content, plan)
        return (*streams, *self._conditions(inputs))

    def loss(self, predictions: Tensor, targets: tuple[Tensor, ...]) -> Tensor:
        """Return the error of a token, the mean over the predicted tokens of each image.

        Equation (6): the tokens of G_0 are given and count nothing.

        Args:
            predictions: as `build_head` gives them.
            targets: tokens `[b, q, ...]` and their groups `[b, q]`.
        """
        tokens, groups = targets
        errors = self.density.per_token_loss(self._asked(predictions), tokens)
        predicted = (groups > 0).float()
        return ((errors * predicted).sum(1) / predicted.sum(1)).mean()

    def outputs(self, predictions: Tensor) -> Tensor:
        """Return patches `[b, q, d]` or logits `[b, q, v]`, in the order of z."""
        return self.density.outputs(self._asked(predictions))

    def _asked(self, predictions: Tensor) -> Tensor:
        """Leave out what condition tokens before the last would predict in one stream."""
        return predictions[:, -self.num_tokens :] if self.paper.streams == "one" else predictions

    @functools.cached_property
    def tokenizer_identity(self) -> str | None:
        """SHA-256 of the tokenizer of images."""
        if self.paper.tokenizer is None:
            return None
        source = self.extra or self.predicted
        assert isinstance(source, Ids | PooledFeatures)
        return source.tokenizer.identity()

    # What `Generates` asks for.

    @property
    def columns(self) -> tuple[Mapping[str, Any], ...]:
        """Hidden tokens all at once, and in 4 and 12 groups."""
        hidden = max(1, self.num_tokens * 3 // 4)
        return tuple({"groups": n} for n in sorted({1, min(4, hidden), min(12, hidden)}))

    def generation(self) -> GVP:
        """Return itself, of models that read what they predict and can be asked for any token.

        Raises:
            UserError: this model cannot.
        """
        paper = self.paper
        faults = {
            "variant p2d reads patches and predicts ids": paper.variant == "p2d",
            "condition_size knows the whole image": paper.condition_size is not None,
            "streams one does not know which token is asked for": paper.streams == "one",
        }
        for fault in [text for text, holds in faults.items() if holds]:
            raise UserError(f"a model with objective.{fault}; pictures need one trained without")
        return self

    def blank_tokens(self, images: Tensor) -> Tensor:
        """Return patches or ids of zeros."""
        return self.content.blank(images)

    def tokens_of(self, inputs: Tensor, index: Tensor | None = None) -> Tensor:
        """Return patches or ids in raster order."""
        return self.content.of(inputs)

    def rows(self, tokens: Tensor, step: Step, known: Known, since: int) -> tuple[Tensor, ...]:
        """Return both streams, with queries for the tokens of a step alone."""
        order, groups = step.plan.order, step.plan.groups.expand(len(tokens), -1)
        order = order.expand(len(tokens), -1)
        return two_streams(
            tokens[:, : step.known],
            order[:, : step.known],
            groups[:, : step.known],
            order[:, step.asked],
            groups[:, step.asked],
        )

    def check_images(self, folder: Path) -> None:
        """Raise UserError where ids are predicted and nothing decodes them."""
        if isinstance(self.predicted, Ids):
            self.to_images(self.blank_tokens(torch.zeros(1, dtype=torch.int64)), folder)

    def to_images(self, tokens: Tensor, folder: Path) -> Tensor:
        """Put patches together, or decode ids."""
        return self.content.to_images(tokens)
