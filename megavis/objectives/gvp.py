"""GVP: Bridging Autoregressive and Masked Modeling for Enhanced Visual Representation Learning.

An image is put in a random order and cut into groups of random length; each group is predicted from
those before it. A content stream encodes the tokens, a query stream knows only where they stand and
predicts them; both share all weights (section 4.2). Who sees whom follows from the groups alone
(section 4.3), so that masked modelling (one predicted group) and autoregressive modelling (a group
for each token) are two settings of one model.

p2p: patches in, pixels out; p2d: patches in, ids out; d2d: ids in and out (section 5).

Legend: b images, T patches, S condition tokens.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

from megavis.composition.asking import Query
from megavis.composition.codebook import Ids
from megavis.composition.condition import Condition
from megavis.composition.reader import Slot, places, vector
from megavis.composition.tokens import Patches
from megavis.config.errors import UserError
from megavis.densities.categorical import Categorical
from megavis.densities.squared_error import SquaredError
from megavis.model.init import Initialization, normal, vision_transformer
from megavis.model.patches import TokenHead, WholeLinear
from megavis.objectives.composition import Composition
from megavis.objectives.gvp_condition import PooledFeatures
from megavis.objectives.gvp_config import GVPConfig
from megavis.schedules.segmented import Grouping


class GVP(Composition):
    """Group after group, in any order."""

    config_type = GVPConfig
    paper: GVPConfig
    default_positions = "sincos"  # MAE's; the paper names no kind
    usual_share = 0.25

    @functools.cached_property
    def reads(self) -> Ids | Patches:
        """Ids (d), or patches of pixels (p)."""
        return self._ids() if self.paper.variant == "d2d" else self._patches()

    @functools.cached_property
    def predicts(self) -> Ids | Patches:
        """What is read, or ids in its place (p2d)."""
        return self._ids() if self.paper.variant == "p2d" else self.reads

    def _patches(self) -> Patches:
        size = self.config.data.image_size
        return Patches(image_size=size, patch_size=self.paper.patch_size)

    def _ids(self) -> Ids:
        assert self.paper.vocabulary_size is not None
        size = self.config.data.image_size
        return Ids(
            image_size=size,
            side=size // self.paper.patch_size,
            vocabulary_size=self.paper.vocabulary_size,
            tokenizer=self.paper.tokenizer,
        )

    @functools.cached_property
    def schedule(self) -> Grouping:
        """In which order tokens are predicted, and in which groups."""
        paper = self.paper
        return Grouping(
            paper.segmentation,
            num_tokens=self.num_tokens,
            num_groups=paper.num_groups,
            boundaries=paper.boundaries,
            shuffled=paper.order == "random",
            seed=self.config.seed,
        )

    @functools.cached_property
    def asks(self) -> Query:
        """By a query stream, or (table 10) by the token before alone."""
        paper = self.paper
        return Query(num_front=paper.num_condition_tokens, queries=paper.streams == "two")

    @functools.cached_property
    def condition(self) -> Condition:
        """y_extra, where it is no learned vector."""
        paper = self.paper
        if paper.condition_size is None:
            return Condition()
        assert paper.tokenizer is not None
        size = self.config.data.image_size
        return PooledFeatures(image_size=size, size=paper.condition_size, tokenizer=paper.tokenizer)

    @functools.cached_property
    def density(self) -> Categorical | SquaredError:
        """A unit Gaussian of each number of a patch, or a categorical distribution of ids."""
        paper = self.paper
        if isinstance(self.predicts, Ids):
            return Categorical(self.core, self.predicts.vocabulary_size, fill=normal(0.02))
        width = self.predicts.width
        return SquaredError(
            width,
            normalize=paper.normalize_targets,
            # In one stream condition tokens before the last predict nothing.
            num_skipped=0 if paper.streams == "two" else paper.num_condition_tokens - 1,
            build_head=functools.partial(TokenHead, self.core, width),
        )

    def slots(self) -> dict[str, Slot]:
        """Return H⁽⁰⁾ = [y; x] + E_pos and G⁽⁰⁾ = w + E_pos (section 4.1).

        The paper writes G⁽⁰⁾ = w without positions. Then all tokens of a group would get one and
        the same prediction, and requirement (1) of section 4.1 wants g(x_{z<t}, z_t), which knows
        z_t.
        """
        core, fill, paper = self.core, normal(0.02), self.paper
        slots = {
            "linear_content": Slot("content", lambda: self.reads.embedding(core)),
            "positions": Slot("positions", places(core, self.position_kind, self.reads.grid, fill)),
            "query": Slot("query", vector(core, fill)),
        }
        if paper.condition_size is not None:
            size, width = paper.condition_size, core.megatron.hidden_size
            slots["linear_condition"] = Slot("front", lambda: WholeLinear(size, width))
        elif paper.num_condition_tokens:
            slots["condition"] = Slot("front", vector(core, fill, paper.num_condition_tokens))
        return slots

    def initialization(self) -> Initialization:
        """Return MAE's, whose recipe section 5 follows."""
        return vision_transformer()

    @property
    def tokenizer_identity(self) -> str | None:
        """SHA-256 of the tokenizer of images."""
        if isinstance(self.condition, PooledFeatures):
            return self.condition.tokenizer.identity()
        return super().tokenizer_identity

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
