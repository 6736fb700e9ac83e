"""iGPT: Generative Pretraining from Pixels (Chen et al., 2020).

An image is a raster sequence of palette ids. The auto-regressive objective (section 2.1) predicts
each pixel from those before it; the BERT objective zeroes the embeddings of randomly chosen pixels
and predicts these from the rest.

Where the paper is silent, the released code decides: a learned start vector is shifted in, the
norm is a gain without mean subtraction, linear layers have no biases, and the token embedding and
the matrix that gives logits are two matrices, the latter zero at the start (appendix A.1).

Legend: b images, n pixels.
"""

from __future__ import annotations

from functools import cached_property
from typing import cast

import torch
from torch import Tensor

from megavis.composition.asking import Asking, Mask, Shift
from megavis.composition.reader import Slot, places, vector
from megavis.composition.tokens import Colours
from megavis.config.choices import OrderKind
from megavis.config.errors import UserError
from megavis.densities.categorical import Categorical
from megavis.model.init import Initialization, normal, zeros
from megavis.model.orders import fixed_order
from megavis.objectives.composition import Composition
from megavis.objectives.igpt_config import IGPTConfig
from megavis.objectives.trainable import Likelihood
from megavis.parallel.random import derive_seed
from megavis.schedules.masked import MaskedShare
from megavis.schedules.one_by_one import OneByOne
from megavis.schedules.orders import Orders


class IGPT(Composition):
    """Next-pixel or masked-pixel prediction."""

    config_type = IGPTConfig
    paper: IGPTConfig
    default_positions = "learned"

    @property
    def weights_need_their_seed(self) -> bool:
        """The seed decides a random order of the pixels, which the network has learned."""
        return self.paper.order == "random"

    @cached_property
    def reads(self) -> Colours:
        """Palette ids."""
        data = self.config.data
        return Colours(
            image_size=data.image_size,
            vocabulary_size=self.paper.vocabulary_size,
            windows=data.crop == "window",
        )

    @cached_property
    def schedule(self) -> OneByOne | MaskedShare:
        """Pixel after pixel in the order π, or BERT's mask (section 2.1)."""
        orders = Orders(self._permutation())
        if self.paper.mode == "autoregressive":
            return OneByOne(orders, name="sample")
        return MaskedShare(orders, share=self.paper.mask_ratio, seed=self.config.seed)

    @cached_property
    def asks(self) -> Asking:
        """By the pixel before; BERT, which needs no mask in attention, by zeros (section 2.2)."""
        return Shift("asked") if self.paper.mode == "autoregressive" else Mask()

    @cached_property
    def density(self) -> Categorical:
        """One logit a colour; the matrix to them starts at zero."""
        return Categorical(self.core, self.paper.vocabulary_size, fill=zeros)

    def slots(self) -> dict[str, Slot]:
        """Return colours, positions, and what stands before the first pixel."""
        grid, core = self.reads.grid, self.core
        slots = {
            "tokens": Slot("content", lambda: self.reads.embedding(core)),
            "positions": Slot("positions", places(core, self.position_kind, grid, normal(0.01))),
        }
        if self.paper.mode == "autoregressive":
            slots["start"] = Slot("start", vector(core, normal(0.02)))
        return slots

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

    def generation(self) -> IGPT:
        """Return itself; raises UserError in BERT mode, which predicts from both sides."""
        if self.paper.mode != "autoregressive":
            raise UserError(
                "a model of objective.mode bert cannot be sampled pixel by pixel; train one with"
                " objective.mode autoregressive"
            )
        return self
