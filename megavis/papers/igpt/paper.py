"""iGPT: Generative Pretraining from Pixels (Chen et al., 2020).

An image is a raster sequence of palette ids. The auto-regressive objective (section 2.1) predicts
each pixel from those before it; the BERT objective zeroes the embeddings of randomly chosen pixels
and predicts these from the rest.

Where the paper is silent, the released code decides: a learned start vector is shifted in, the
norm is a gain without mean subtraction, linear layers have no biases, and the token embedding and
the matrix that gives logits are two matrices, the latter zero at the start (appendix A.1).
"""

from __future__ import annotations

from functools import cached_property

from megavis.composition.asking import Asking, Mask, Shift
from megavis.composition.composition import Composition
from megavis.composition.tokens import Colors
from megavis.composition.trainable import Likelihood
from megavis.densities.categorical import Categorical
from megavis.model.init import Initialization, normal, scaled_by_size, zeros
from megavis.papers.igpt.config import IGPTConfig
from megavis.schedules.masked import MaskedShare
from megavis.schedules.one_by_one import OneByOne
from megavis.schedules.orders import Orders, order_of_run


class IGPT(Composition):
    """Next-pixel or masked-pixel prediction."""

    config_type = IGPTConfig
    paper: IGPTConfig
    default_positions = "learned"
    part_names = {"content": "tokens", "positions": "positions", "start": "start"}
    deviations = {"positions": 0.01}

    @property
    def weights_need_their_seed(self) -> bool:
        """The seed decides a random order of the pixels, which the network has learned."""
        return self.paper.order == "random"

    @cached_property
    def reads(self) -> Colors:
        """Palette ids."""
        return self.colours()

    @cached_property
    def schedule(self) -> OneByOne | MaskedShare:
        """Pixel after pixel in the order π, or BERT's mask (section 2.1)."""
        paper, side, seed = self.paper, self.config.data.image_size, self.config.seed
        orders = Orders(order_of_run(paper.order, side, block=paper.order_block, seed=seed))
        if paper.mode == "autoregressive":
            return OneByOne(orders, name="sample")
        return MaskedShare(orders, share=paper.mask_ratio, seed=seed)

    @cached_property
    def asks(self) -> Asking:
        """By the pixel before; BERT, which needs no mask in attention, by zeros (section 2.2)."""
        return Shift("asked") if self.paper.mode == "autoregressive" else Mask()

    @cached_property
    def density(self) -> Categorical:
        """One logit a colour; the matrix to them starts at zero (appendix A.1)."""
        std = self.paper.logits_std
        fill = normal(std) if std else zeros
        return Categorical(self.core, self.paper.vocabulary_size, fill=fill)

    def initialization(self) -> Initialization:
        """Return the released code's choice: attention scaled by width and depth, MLPs 0.02."""
        model = self.config.model
        return scaled_by_size(model.hidden_size, model.num_layers, mlp=0.02)

    @property
    def likelihood(self) -> Likelihood | None:
        """Every token is predicted once from those before it; BERT's are masked and guessed."""
        if self.paper.mode != "autoregressive":
            return None
        colours = self.paper.vocabulary_size
        return Likelihood(f"token of the {colours}-colour palette", self.num_tokens)
