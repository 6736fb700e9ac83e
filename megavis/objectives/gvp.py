"""GVP: Bridging Autoregressive and Masked Modeling for Enhanced Visual Representation Learning.

An image is put in a random order and cut into groups of random length; each group is predicted from
those before it. A content stream encodes the tokens, a query stream knows only where they stand and
predicts them; both share all weights (section 4.2). Who sees whom follows from the groups alone
(section 4.3), so that masked modelling (one predicted group) and autoregressive modelling (a group
for each token) are two settings of one model.

p2p: patches in, pixels out (section 5).

Legend: b images, T patches, S condition tokens, K predicted groups, c content and q query tokens,
d numbers of a patch.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from megavis.config.errors import UserError
from megavis.data.batch import Batch
from megavis.data.manifest import Manifest
from megavis.model.flops import Workload
from megavis.model.init import Initialization, vision_transformer
from megavis.model.orders import random_orders, take_places
from megavis.model.patches import PatchEmbedding, TokenHead
from megavis.model.positions import PositionKind, carried_names
from megavis.model.visibility import Kind
from megavis.objectives import gvp_segmentation as segmentation
from megavis.objectives.base import Objective, Sequence
from megavis.objectives.gvp_config import GVPConfig
from megavis.objectives.gvp_layers import TwoStreamEmbedding, TwoStreams
from megavis.tokenizers.patches import (
    normalize_patches,
    patchify,
    standardize,
    to_uint8,
    unpatchify,
)


class GVP(Objective):
    """Group after group, in any order."""

    config_type = GVPConfig

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

    @property
    def num_outputs(self) -> int:
        """Numbers of a patch."""
        return 3 * self.paper.patch_size**2

    def workload(self) -> Workload:
        """Return both streams; keys and values are those of content alone."""
        first, last = self.paper.bounds(self.config)
        seen, read = self.paper.num_condition_tokens + last, self.num_tokens - first
        return Workload(seen + read, seen, float(seen), read, self.num_outputs)

    def check_data(self, manifest: Manifest) -> Iterator[str]:
        """Want photographs."""
        if manifest.kind != "jpeg":
            yield f"holds {manifest.kind} shards; gvp wants jpeg shards"

    def initialization(self) -> Initialization:
        """Return MAE's, whose recipe section 5 follows."""
        return vision_transformer()

    def build_embedding(self) -> nn.Module:
        """Return the start of both streams."""
        return TwoStreamEmbedding(
            self.core,
            PatchEmbedding(self.num_outputs, self.config.model.hidden_size),
            side=self.config.data.image_size // self.paper.patch_size,
            condition=self.paper.num_condition_tokens,
            positions=self.position_kind,
        )

    def build_head(self) -> nn.Module:
        """Return the last norm and the linear map to pixels."""
        return TokenHead(self.core, self.num_outputs)

    def sequence(self, batch: Batch) -> Sequence:
        """Draw order and groups, and ask for what they predict."""
        patches = self.patches_of(batch.inputs)
        order, groups = self.draw(batch.sample_index)
        first, last = self.paper.bounds(self.config)
        asked, asked_groups = order[:, first:], groups[:, first:]
        inputs = two_streams(patches, order[:, :last], groups[:, :last], asked, asked_groups)
        targets = take_places(patches, asked)
        if self.paper.normalize_targets:
            targets = normalize_patches(targets)
        return Sequence(inputs, (targets, asked_groups))

    def draw(self, sample_index: Tensor) -> tuple[Tensor, Tensor]:
        """Return z and the group of each of its places, int64 `[b, T]` both."""
        paper, count, seed = self.paper, self.num_tokens, self.config.seed
        if paper.order == "random":
            order = random_orders(sample_index, count, seed=seed)
        else:
            order = raster(sample_index, count)
        if paper.segmentation == "given":
            boundaries = self._given_boundaries(sample_index.device).expand(len(sample_index), -1)
        else:
            boundaries = segmentation.draw_boundaries(
                paper.segmentation,
                sample_index,
                num_tokens=count,
                num_groups=paper.num_groups,
                seed=seed,
            )
        return order, segmentation.groups_of(boundaries, count)

    def patches_of(self, images: Any) -> Tensor:
        """Return standardised patches float32 `[b, T, d]` of images uint8 `[b, h, w, 3]`.

        Raises:
            UserError: they have another size or type.
        """
        side = self.config.data.image_size
        if images.dtype != torch.uint8 or images.shape[1:] != (side, side, 3):
            raise UserError(
                f"the images have shape {list(images.shape)} and type {images.dtype}; gvp takes"
                f" uint8 [b, {side}, {side}, 3]"
            )
        return patchify(standardize(images), self.paper.patch_size)

    def images_of(self, patches: Tensor) -> Tensor:
        """Undo `patches_of`: `[b, T, d]` to the nearest uint8 `[b, h, w, 3]`."""
        return to_uint8(unpatchify(patches, self.paper.patch_size))

    def check_filling(self) -> None:
        """Want pixels as they are.

        Raises:
            UserError: each patch is predicted standardised by itself; what it was is not known.
        """
        if self.paper.normalize_targets:
            raise UserError(
                "a model with objective.normalize_targets does not know how bright its patches"
                " are; pictures need one trained without"
            )

    def inputs_of_group(
        self, patches: Tensor, order: Tensor, boundaries: tuple[int, ...]
    ) -> tuple[Tensor, ...]:
        """Return both streams, with queries for the last group alone."""
        *_, first, last = boundaries
        ends = torch.tensor(boundaries[:-1], device=order.device).expand(len(order), -1)
        groups = segmentation.groups_of(ends, self.num_tokens)
        asked = slice(first, last)
        return two_streams(
            patches, order[:, :first], groups[:, :first], order[:, asked], groups[:, asked]
        )

    def feature_inputs(self, batch: Batch) -> tuple[Tensor, ...]:
        """Return the content stream alone, in raster order, with the causal mask kept.

        "For linear probing, we keep the causal mask to maintain the same feature distribution"
        (section 5); the groups are typical ones of training, without a draw.
        """
        order = raster(batch.sample_index, self.num_tokens)
        return content_alone(self.patches_of(batch.inputs), order, self._typical(order))

    def _typical(self, order: Tensor) -> Tensor:
        """Return groups int64 `[b, T]` for features."""
        paper, count = self.paper, self.num_tokens
        if paper.segmentation == "given":
            boundaries = self._given_boundaries(order.device)
        else:
            boundaries = segmentation.typical_boundaries(
                paper.segmentation, count, paper.num_groups, device=order.device
            )
        return segmentation.groups_of(boundaries.expand(len(order), -1), count)

    @functools.cache  # noqa: B019 - one objective a process; the copy waits for the device
    def _given_boundaries(self, device: torch.device) -> Tensor:
        return torch.tensor(self.paper.boundaries, device=device)

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
            inputs: images uint8 `[b, h, w, 3]`.
            order: z, int64 `[b, T]`, patches in raster order; drawn where absent.
            boundaries: n_0 .. n_{K-1}, for all images alike; drawn where absent.
            sample_index: int64 `[b]`, decides the draws; 0 .. b - 1 where absent.

        Raises:
            UserError: the order is no permutation, or the boundaries do not increase.
        """
        patches, count = self.patches_of(inputs), self.num_tokens
        index = torch.arange(len(patches)) if sample_index is None else sample_index
        drawn, groups = self.draw(index.to(patches.device))
        if order is None:
            order = drawn
        else:
            segmentation.check_order(order, count)
        if boundaries is not None:
            fault = segmentation.fault_of_boundaries(boundaries, count)
            if fault:
                raise UserError(f"boundaries {fault}")
            ends = torch.as_tensor(boundaries, device=order.device).expand(len(order), -1)
            groups = segmentation.groups_of(ends, count)
        return two_streams(patches, order, groups, order, groups)

    def loss(self, predictions: Tensor, targets: tuple[Tensor, ...]) -> Tensor:
        """Return the squared error a number, the mean over the predicted patches of each image.

        Equation (6) with a unit Gaussian a patch, up to a constant: the patches of G_0 are given
        and count nothing.

        Args:
            predictions: `[b, q, d]`.
            targets: patches `[b, q, d]` and their groups `[b, q]`.
        """
        patches, groups = targets
        errors = (predictions.float() - patches).square().mean(-1)
        predicted = (groups > 0).float()
        return ((errors * predicted).sum(1) / predicted.sum(1)).mean()

    def outputs(self, predictions: Tensor) -> Tensor:
        """Return patches `[b, q, d]` in the order of z, standardised as `patches_of` gives them."""
        return predictions


def two_streams(
    patches: Tensor, seen: Tensor, groups: Tensor, asked: Tensor, asked_groups: Tensor
) -> TwoStreams:
    """Return what the first layer takes.

    Args:
        patches: `[b, T, d]` in raster order.
        seen: places int64 `[b, c]` of the content.
        groups: of the content, int64 `[b, c]`.
        asked: places int64 `[b, q]` of the queries.
        asked_groups: of the queries, int64 `[b, q]`. Those of G_0 see what G_1 sees, by equation
            (11); nothing is learned from them.
    """
    return take_places(patches, seen), seen, groups, asked, asked_groups.clamp(min=1)


def content_alone(patches: Tensor, order: Tensor, groups: Tensor) -> TwoStreams:
    """Return what the first layer takes, without queries."""
    return two_streams(patches, order, groups, order[:, :0], groups[:, :0])


def raster(sample_index: Tensor, num_tokens: int) -> Tensor:
    """Return the order 0, 1, ..., T - 1 for each image: int64 `[b, T]`."""
    places = torch.arange(num_tokens, device=sample_index.device)
    return places.expand(len(sample_index), -1)
