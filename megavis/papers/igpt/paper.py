"""iGPT: Generative Pretraining from Pixels (Chen et al., 2020).

An image is a raster sequence of palette ids. The autoregressive objective (section 2.1) predicts
each pixel from those before it; the BERT objective zeroes the embeddings of random pixels and
predicts these from the rest.

Details not in the paper follow the released code: a learned start vector is shifted in, norms have
a gain and no mean subtraction, linear layers have no biases, and the projection to logits is not
tied to the token embedding and initialised to zero (appendix A.1).
"""

from __future__ import annotations

from functools import cached_property

from megavis.composition.asking import Asking, Mask, Shift
from megavis.composition.composition import Composition
from megavis.composition.tokens import Colors
from megavis.composition.trainable import Likelihood
from megavis.densities.categorical import Categorical
from megavis.model.parameters import Initialization, normal, zeros
from megavis.papers.igpt.config import IGPTConfig
from megavis.schedules.masked import MaskedShare
from megavis.schedules.one_by_one import OneByOne
from megavis.schedules.orders import Orders, order_of_run


class IGPT(Composition):
    """Next-pixel or masked-pixel prediction."""

    config_type = IGPTConfig
    paper: IGPTConfig
    default_positions = "learned"
    deviations = {"positions": 0.01}

    @property
    def weights_need_their_seed(self) -> bool:
        """True for a random order, which the seed determines."""
        return self.paper.order == "random"

    @cached_property
    def reads(self) -> Colors:
        """Palette ids."""
        return self.colours()

    @cached_property
    def schedule(self) -> OneByOne | MaskedShare:
        """One pixel at a time in the order π, or BERT's mask (section 2.1)."""
        paper, side, seed = self.paper, self.config.data.image_size, self.config.seed
        orders = Orders(order_of_run(paper.order, side, block=paper.order_block, seed=seed))
        if paper.mode == "autoregressive":
            return OneByOne(orders)
        return MaskedShare(orders, share=paper.mask_ratio, seed=seed)

    @cached_property
    def asks(self) -> Asking:
        """The previous pixel's row predicts; BERT masks by zeros instead (section 2.2)."""
        if self.paper.mode == "autoregressive":
            return Shift("asked")
        return Mask(filler="zero_embedding")

    @cached_property
    def density(self) -> Categorical:
        """Logits over the colours, with zero initial weights by default (appendix A.1)."""
        std = self.paper.logits_std
        fill = normal(std) if std else zeros
        return Categorical(self.core, self.paper.vocabulary_size, fill=fill)

    def initialization(self) -> Initialization:
        """Return the released code's: attention scaled by width and depth, MLPs with 0.02."""
        width, depth = self.config.model.hidden_size, self.config.model.num_layers
        projection, output = normal(width**-0.5), normal((width * depth) ** -0.5)
        return Initialization(projection, projection, output, normal(0.02), normal(0.02))

    @property
    def likelihood(self) -> Likelihood | None:
        """Exact if autoregressive; None for BERT."""
        if self.paper.mode != "autoregressive":
            return None
        colours = self.paper.vocabulary_size
        return Likelihood(f"token of the {colours}-colour palette", self.num_tokens)
