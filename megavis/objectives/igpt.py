"""iGPT: Generative Pretraining from Pixels (Chen et al., 2020).

An image is a raster sequence of palette ids. The auto-regressive objective (section 2.1) predicts
each pixel from those before it; the BERT objective zeroes the embeddings of randomly chosen pixels
and predicts these from the rest.

Where the paper is silent, the released code decides: a learned start vector is shifted in, the
norm is a gain without mean subtraction, linear layers have no biases, and the token embedding and
the matrix that gives logits are two matrices, the latter zero at the start (appendix A.1).

Legend: b images, n tokens, h hidden size, v colours of the palette.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megavis.config.choices import OrderKind, PositionKind
from megavis.config.errors import UserError
from megavis.data.batch import Batch
from megavis.data.manifest import Manifest
from megavis.model.heads import VocabularyHead, split_cross_entropy, whole_logits
from megavis.model.init import Initialization, normal, zeros
from megavis.model.orders import SharedOrder, fixed_order
from megavis.model.positions import carried_names
from megavis.model.visibility import Kind
from megavis.objectives.base import Objective, Sequence, blank_batch
from megavis.objectives.igpt_config import IGPTConfig
from megavis.objectives.igpt_layers import NOTHING, PixelEmbedding
from megavis.objectives.trainable import Likelihood
from megavis.parallel.random import derive_seed, uniform


class IGPT(Objective):
    """Next-pixel or masked-pixel prediction."""

    config_type = IGPTConfig

    @property
    def paper(self) -> IGPTConfig:
        """The paper's section of the config."""
        assert isinstance(self.config.objective, IGPTConfig)
        return self.config.objective

    @property
    def num_tokens(self) -> int:
        """Pixels of an image."""
        return self.config.data.image_size**2

    @property
    def position_kind(self) -> PositionKind:
        """Learned positions, unless the config says otherwise."""
        return self.config.model.positions or "learned"

    @property
    def carries(self) -> tuple[str, ...]:
        """Coordinates, for rotary positions."""
        return carried_names(self.position_kind)

    @property
    def weights_need_their_seed(self) -> bool:
        """The seed decides a random order of the pixels, which the network has learned."""
        return self.paper.order == "random"

    @property
    def num_outputs(self) -> int:
        """One logit a colour."""
        return self.paper.vocabulary_size

    def check_data(self, manifest: Manifest) -> Iterator[str]:
        """Want palette shards of the config's size, with no more colours than logits."""
        if manifest.kind != "palette":
            yield f"holds {manifest.kind} shards; igpt wants palette shards"
        size = self.config.data.image_size
        if manifest.image_size != size and self.config.data.crop != "window":
            yield f"holds images of {manifest.image_size}² pixels; data.image_size is {size}"
        if manifest.vocabulary_size > self.paper.vocabulary_size:
            yield (
                f"has a palette of {manifest.vocabulary_size} colours;"
                f" objective.vocabulary_size is {self.paper.vocabulary_size}"
            )

    @property
    def visibility_kind(self) -> Kind:
        """Causal, or everything for BERT, which needs no mask in attention (section 2.2)."""
        return "causal" if self.paper.mode == "autoregressive" else "full"

    def initialization(self) -> Initialization:
        """Return the released code's choice: attention scaled by width and depth, MLPs 0.02."""
        width, depth = self.config.model.hidden_size, self.config.model.num_layers
        return Initialization(
            query=normal(width**-0.5),
            key_value=normal(width**-0.5),
            attention_output=normal((width * depth) ** -0.5),
            mlp_input=normal(0.02),
            mlp_output=normal(0.02),
        )

    def build_embedding(self) -> nn.Module:
        """Return the pixel embedding."""
        return PixelEmbedding(self.core, self.paper, self.position_kind)

    def build_head(self) -> nn.Module:
        """Return the last norm and the zero-initialised matrix to logits."""
        return VocabularyHead(self.core, self.paper.vocabulary_size, zeros)

    @property
    def likelihood(self) -> Likelihood | None:
        """Every token is predicted once from those before it; BERT's are masked and guessed."""
        if self.paper.mode != "autoregressive":
            return None
        colours = self.paper.vocabulary_size
        return Likelihood(f"token of the {colours}-colour palette", self.num_tokens)

    @cached_property
    def order(self) -> SharedOrder:
        """The order π of section 2.1: the pixel at each place."""
        return SharedOrder(self._permutation())

    def _permutation(self) -> Tensor:
        """Return the order π: int64 `[n]`."""
        kind, side = self.paper.order, self.config.data.image_size
        if not isinstance(kind, str):
            return torch.tensor(kind)
        if kind == "random":
            generator = torch.Generator().manual_seed(derive_seed(self.config.seed, "order") >> 1)
            return torch.randperm(side**2, generator=generator)
        # The config has let no other word pass.
        kind = cast(OrderKind, kind)
        return fixed_order(kind, height=side, width=side, block=self.paper.order_block)

    def blank_batch(self, num_images: int, device: torch.device) -> Batch:
        """Return ids of the first colour."""
        return blank_batch(num_images, (self.num_tokens,), torch.int64, device)

    def sequence(self, batch: Batch) -> Sequence:
        """Order the pixels and draw BERT's mask."""
        inputs = self.inputs_from(batch.inputs, sample_index=batch.sample_index)
        return Sequence(inputs, (self.to_order(batch.inputs), *inputs[2:]))

    @property
    def has_random_sequence(self) -> bool:
        """BERT's masks are drawn."""
        return self.paper.mode == "bert"

    @property
    def has_random_features(self) -> bool:
        """BERT's inputs are masked for features too, "to keep inputs in-distribution" (4.6)."""
        return self.has_random_sequence

    def inputs_for_features(
        self, inputs: Tensor, sample_index: Tensor | None
    ) -> tuple[Tensor, ...]:
        """Return the inputs of training."""
        return self.inputs_from(inputs, sample_index=sample_index)

    def to_order(self, raster: Tensor) -> Tensor:
        """Put ids `[b, n]` from raster order into the run's order; returns int64."""
        return raster.long()[:, self.order.on(raster.device)]

    def to_raster(self, ordered: Tensor) -> Tensor:
        """Put ids `[b, n]` from the run's order into raster order."""
        return ordered[:, self.order.inverse_on(ordered.device)]

    def check_generation(self) -> None:
        """Raise UserError in BERT mode, which predicts from both sides."""
        if self.paper.mode != "autoregressive":
            raise UserError(
                "a model of objective.mode bert cannot be sampled pixel by pixel; train one with"
                " objective.mode autoregressive"
            )

    def inputs_at(self, ids: Tensor, start: int, stop: int) -> tuple[Tensor, ...]:
        """Return the inputs of the places [start, stop) alone, for generation with a cache.

        Args:
            ids: int64 `[b, m]` in the run's order; those before `stop - 1` are read.
            start: first place.
            stop: end of the places.

        Raises:
            UserError: in BERT mode, which predicts from both sides.
        """
        self.check_generation()
        previous = ids[:, max(start - 1, 0) : stop - 1]
        if start == 0:
            previous = F.pad(previous, (1, 0), value=NOTHING)
        return previous, self.order.on(ids.device)[None, start:stop]

    def inputs_from(
        self,
        inputs: Any,
        *,
        sample_index: Tensor | None = None,
        mask: Tensor | None = None,
        **_: Any,
    ) -> tuple[Tensor, ...]:
        """Return what each place sees, its pixel, and the mask for BERT.

        Args:
            inputs: ids int64 `[b, n]` in raster order.
            sample_index: int64 `[b]`, decides the mask where none is given; without it, all images
                have that of sample 0.
            mask: bool `[b, n]` in raster order; true where the pixel is hidden.
        """
        ids = self.to_order(inputs)
        if self.paper.mode == "autoregressive":
            return self.inputs_at(ids, 0, self.num_tokens)
        order = self.order.on(ids.device)
        if mask is None:
            if sample_index is None:
                sample_index = torch.zeros(len(ids), dtype=torch.int64)
            index, seed = sample_index.to(ids.device), self.config.seed
            draws = uniform(index, self.num_tokens, seed=seed, purpose="bert-mask")
            mask = draws < self.paper.mask_ratio
        return ids, order[None], mask[:, order]

    def loss(self, predictions: Tensor, targets: tuple[Tensor, ...]) -> Tensor:
        """Return nats a token, the mean over all pixels, or over the masked ones of each image.

        L_BERT of section 2.1 sums over the masked pixels; the released code takes their mean.

        Args:
            predictions: this process's logits `[n, b, v / tensor size]`.
            targets: ids `[b, n]`; for BERT also the mask `[b, n]`.
        """
        ids, *masks = targets
        nats = split_cross_entropy(predictions, ids.t().contiguous(), self.core).t()
        if not masks:
            return nats.mean()
        weights = masks[0].float()
        return ((nats * weights).sum(1) / weights.sum(1).clamp(min=1.0)).mean()

    def outputs(self, predictions: Tensor) -> Tensor:
        """Return logits `[b, n, v]`, in the run's order of the pixels."""
        return whole_logits(predictions, self.core)
