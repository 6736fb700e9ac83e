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
from pathlib import Path
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megavis.config.choices import OrderKind, PositionKind
from megavis.config.errors import UserError
from megavis.data.batch import Batch
from megavis.data.manifest import PALETTE_NAME, Manifest
from megavis.densities.categorical import Categorical
from megavis.model.init import Initialization, normal, zeros
from megavis.model.orders import fixed_order, take_places
from megavis.model.positions import carried_names
from megavis.model.visibility import Kind
from megavis.objectives.base import Objective, Sequence, blank_batch
from megavis.objectives.generates import Known
from megavis.objectives.igpt_config import IGPTConfig
from megavis.objectives.igpt_layers import NOTHING, PixelEmbedding
from megavis.objectives.trainable import Likelihood
from megavis.parallel.random import derive_seed
from megavis.schedules.base import Arrangement, Step
from megavis.schedules.masked import MaskedShare
from megavis.schedules.one_by_one import OneByOne
from megavis.schedules.orders import Orders
from megavis.tokenizers.palette import Palette


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

    @cached_property
    def density(self) -> Categorical:
        """One logit a colour; the matrix to them starts at zero."""
        return Categorical(self.core, self.paper.vocabulary_size, fill=zeros)

    @cached_property
    def schedule(self) -> OneByOne | MaskedShare:
        """Pixel after pixel in the order π, or BERT's mask (section 2.1)."""
        orders = Orders(self._permutation())
        if self.paper.mode == "autoregressive":
            return OneByOne(orders, name="sample")
        return MaskedShare(orders, share=self.paper.mask_ratio, seed=self.config.seed)

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

    @property
    def likelihood(self) -> Likelihood | None:
        """Every token is predicted once from those before it; BERT's are masked and guessed."""
        if self.paper.mode != "autoregressive":
            return None
        colours = self.paper.vocabulary_size
        return Likelihood(f"token of the {colours}-colour palette", self.num_tokens)

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
        plan = self.schedule.draw(batch.sample_index)
        ids = take_places(batch.inputs.long(), plan.order)
        inputs = self._inputs(ids, plan)
        return Sequence(inputs, (ids, *inputs[2:]))

    @property
    def has_random_features(self) -> bool:
        """BERT's inputs are masked for features too, "to keep inputs in-distribution" (4.6)."""
        return self.paper.mode == "bert"

    def inputs_for_features(
        self, inputs: Tensor, sample_index: Tensor | None
    ) -> tuple[Tensor, ...]:
        """Return the inputs of training."""
        return self.inputs_from(inputs, sample_index=sample_index)

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
        if mask is not None and isinstance(self.schedule, MaskedShare):
            plan = self.schedule.hiding(mask.to(inputs.device))
        else:
            index = torch.zeros(len(inputs)).long() if sample_index is None else sample_index
            plan = self.schedule.draw(index.to(inputs.device))
        return self._inputs(take_places(inputs.long(), plan.order), plan)

    def _inputs(self, ids: Tensor, plan: Arrangement) -> tuple[Tensor, ...]:
        """Return the inputs of all places, for ids in the order of the plan."""
        if self.paper.mode == "autoregressive":
            return self.inputs_at(ids, 0, self.num_tokens)
        return ids, plan.order, plan.groups > 0

    def inputs_at(self, ids: Tensor, start: int, stop: int) -> tuple[Tensor, ...]:
        """Return the inputs of the places [start, stop), of which each sees the id before it.

        Args:
            ids: int64 `[b, m]` in the run's order; those before `stop - 1` are read.
            start: first place.
            stop: end of the places.
        """
        order = self.schedule.orders.shared(ids.device)
        previous = ids[:, max(start - 1, 0) : stop - 1]
        if start == 0:
            previous = F.pad(previous, (1, 0), value=NOTHING)
        return previous, order[:, start:stop]

    def loss(self, predictions: Tensor, targets: tuple[Tensor, ...]) -> Tensor:
        """Return nats a token, the mean over all pixels, or over the masked ones of each image.

        L_BERT of section 2.1 sums over the masked pixels; the released code takes their mean.

        Args:
            predictions: this process's logits `[n, b, v / tensor size]`.
            targets: ids `[b, n]`; for BERT also the mask `[b, n]`.
        """
        ids, *masks = targets
        nats = self.density.per_token_loss(predictions, ids)
        if not masks:
            return nats.mean()
        weights = masks[0].float()
        return ((nats * weights).sum(1) / weights.sum(1).clamp(min=1.0)).mean()

    # What `Generates` asks for.

    def generation(self) -> IGPT:
        """Return itself; raises UserError in BERT mode, which predicts from both sides."""
        if self.paper.mode != "autoregressive":
            raise UserError(
                "a model of objective.mode bert cannot be sampled pixel by pixel; train one with"
                " objective.mode autoregressive"
            )
        return self

    def blank_tokens(self, images: Tensor) -> Tensor:
        """Return ids of the first colour, int64 `[b, n]`."""
        return images.new_zeros(len(images), self.num_tokens)

    def tokens_of(self, inputs: Tensor, index: Tensor | None = None) -> Tensor:
        """Return ids int64 `[b, n]` as palette shards hold them; raises UserError for others."""
        if inputs.ndim != 2 or inputs.shape[1] != self.num_tokens or inputs.is_floating_point():
            raise UserError(
                f"the images have shape {list(inputs.shape)} and type {inputs.dtype}; this run"
                f" takes ids [b, {self.num_tokens}]"
            )
        return inputs.long()

    def rows(self, tokens: Tensor, step: Step, known: Known, since: int) -> tuple[Tensor, ...]:
        """Return the inputs of the places that are not cached, the last of which is asked for."""
        return self.inputs_at(tokens, since, step.asked.stop)

    def check_images(self, folder: Path) -> None:
        """Raise UserError where the run folder has no palette."""
        Palette.load(folder / PALETTE_NAME)

    def to_images(self, tokens: Tensor, folder: Path) -> Tensor:
        """Return the colours of ids; raises UserError where the run folder has no palette."""
        palette, side = Palette.load(folder / PALETTE_NAME), self.config.data.image_size
        # A model may have more outputs than the palette colours; it learns never to use them.
        known = tokens.clamp(max=palette.num_tokens - 1)
        colours = palette.decode(known.cpu().numpy()).reshape(-1, side, side, 3)
        return torch.from_numpy(colours)
