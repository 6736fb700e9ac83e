"""GVP: Bridging Autoregressive and Masked Modeling for Enhanced Visual Representation Learning.

An image is put in a random order and cut into groups of random length; each group is predicted from
those before it. A content stream encodes the tokens, and a query stream, which has only their
positions, predicts them; both share all weights (section 4.2). The groups alone determine the
attention mask (section 4.3), so masked modelling (one predicted group) and autoregressive modelling
(one group per token) are two settings of the same model.

p2p: patches to pixels; p2d: patches to ids; d2d: ids to ids (section 5).
"""

from __future__ import annotations

from functools import cached_property, partial

from megavis.composition.asking import Query
from megavis.composition.composition import Composition
from megavis.composition.condition import Condition, PooledFeatures
from megavis.composition.encoded_tokens import TokenIds
from megavis.composition.tokens import Patches
from megavis.densities.categorical import Categorical
from megavis.densities.squared_error import SquaredError
from megavis.model.embeddings import TokenHead
from megavis.model.parameters import normal
from megavis.papers.gvp.config import GVPConfig
from megavis.schedules.segmented import Grouping


class GVP(Composition):
    """Predict group by group, in any order.

    The paper writes G⁽⁰⁾ = w without positions (section 4.1). Then all tokens of a group would get
    the same prediction, but its requirement (1) asks for g(x_{z<t}, z_t), so G⁽⁰⁾ has them here.
    """

    config_type = GVPConfig
    paper: GVPConfig
    default_positions = "sincos"  # as in MAE; not specified in the paper
    default_share = 0.25

    @cached_property
    def reads(self) -> TokenIds | Patches:
        """Ids (d), or patches of pixels (p)."""
        return self.ids() if self.paper.variant == "d2d" else self.patches()

    @cached_property
    def predicts(self) -> TokenIds | Patches:
        """The input tokens, or ids (p2d)."""
        return self.ids() if self.paper.variant == "p2d" else self.reads

    @cached_property
    def schedule(self) -> Grouping:
        """Order and groups of the tokens."""
        tuned = self.config.finetune
        # Without masks neither matters.
        masks = tuned is None or tuned.visibility == "kept"
        return Grouping(
            self.paper.segmentation,
            num_tokens=self.num_tokens,
            num_groups=self.paper.num_groups,
            boundaries=self.paper.boundaries,
            shuffled=self.paper.order == "random",
            draws_features=masks and self.paper.feature_order == "drawn",
            seed=self.config.seed,
        )

    @cached_property
    def asks(self) -> Query:
        """A query stream, or (table 10) the token before."""
        paper = self.paper
        return Query(num_front=paper.num_condition_tokens, queries=paper.streams == "two")

    @cached_property
    def condition(self) -> Condition:
        """y_extra: learned vectors, or features of the whole image (appendix E)."""
        size, tokenizer = self.paper.condition_size, self.paper.tokenizer
        if size is None:
            return Condition()  # the vectors are the front rows
        assert tokenizer is not None
        side, key = self.config.data.image_size, "objective.condition_size"
        return PooledFeatures(side, size=size, tokenizer=tokenizer, size_key=key)

    @cached_property
    def density(self) -> Categorical | SquaredError:
        """Squared error of patches, or a categorical distribution of ids."""
        paper, predicts = self.paper, self.predicts
        if isinstance(predicts, TokenIds):
            return Categorical(self.core, predicts.vocabulary_size, fill=normal(0.02))
        return SquaredError(
            predicts.width,
            normalize=paper.normalize_targets,
            # In one stream, condition tokens before the last predict nothing.
            num_skipped=0 if paper.streams == "two" else paper.num_condition_tokens - 1,
            build_head=partial(TokenHead, self.core, predicts.width),
        )
