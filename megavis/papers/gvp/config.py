"""GVP: Bridging Autoregressive and Masked Modeling for Enhanced Visual Representation Learning.

An image is put in a random order and cut into groups of random length; each group is predicted from
those before it. A content stream encodes the tokens, and a query stream, which has only their
positions, predicts them; both share all weights (section 4.2). The groups alone determine the
attention mask (section 4.3), so masked modelling (one predicted group) and autoregressive modelling
(one group per token) are two settings of the same model.

p2p: patches to pixels; p2d: patches to ids; d2d: ids to ids (section 5).

The paper writes G⁽⁰⁾ = w without positions (section 4.1). All tokens of a group would then get the
same prediction, whereas its requirement (1) asks for g(x_{z<t}, z_t); here G⁽⁰⁾ has positions. They
are MAE's, since the paper does not specify them.

Legend: S condition tokens, K predicted groups.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from megavis.config.schema import ConfigIssue, NonNegative, Positive, RunConfig
from megavis.grammar.boundaries import Cut
from megavis.grammar.grammar import Grammar
from megavis.grammar.paper import PaperConfig, Renamed
from megavis.grammar.words import (
    AnyCondition,
    Categorical,
    Groups,
    Ids,
    LearnedTokens,
    Patches,
    PooledFeatures,
    Query,
    SquaredError,
)


class GVPConfig(PaperConfig):
    """Config keys of GVP."""

    names: ClassVar[Mapping[str, str | Renamed]] = {
        "predicts": Renamed("variant", "set it to p2p or d2d"),
        "schedule.length": "segmentation",
        "asks.start": Renamed("num_condition_tokens", "set it to 1 or more"),
        "density.normalize": "normalize_targets",
        "condition": "condition_size",
        "condition.count": "num_condition_tokens",
        "condition.feature_size": "condition_size",
    }

    name: Literal["gvp"] = "gvp"
    variant: Literal["p2p", "p2d", "d2d"] = "p2p"
    """Input and predicted tokens: pixels (p) or ids of a discrete tokenizer (d)."""
    patch_size: Positive = 16
    """Side of a patch in pixels; an id represents one patch."""
    vocabulary_size: Annotated[int, Field(gt=1)] | None = None
    """Vocabulary size of the tokenizer; required by p2d and d2d."""
    tokenizer: str | None = None
    """Run folder of the tokenizer that encodes images as ids or features; d2d on ids shards needs
    none."""
    streams: Literal["two", "one"] = "two"
    """With `one`, each patch is predicted from the row of the token before it, which lacks the
    patch's position: the row "+Causal Masks" of table 10."""
    order: Literal["random", "raster"] = "random"
    """z: a random permutation for each image, or raster order (table 3)."""
    segmentation: Cut = "mixed"
    """How groups are cut (section 3.2, appendix B); `given` uses `boundaries`."""
    num_groups: Positive = 20
    """K, the number of predicted groups."""
    boundaries: Annotated[tuple[int, ...], Field(strict=False)] | None = None
    """n_0 to n_{K-1} for `given`: the number of tokens up to the end of each group."""
    num_condition_tokens: NonNegative = 1
    """S, learned tokens for y_extra; 1 is a class token."""
    condition_size: Positive | None = None
    """Channels of the tokenizer's features, whose mean over an image is y_extra instead of learned
    tokens (appendix E); absent for learned tokens."""
    feature_order: Literal["raster", "drawn"] = "raster"
    """Order and groups of the tokens for features under the causal mask, which the paper does not
    specify: `raster` order with even groups up to their mean end in training, without random draws;
    or `drawn` for each image as in training, where probes vote over several draws."""
    normalize_targets: bool = False
    """Standardise each target patch by its own mean and standard deviation, as in MAE."""

    def own_faults(self, run: RunConfig) -> Iterator[ConfigIssue]:
        """Yield keys that the variant needs or does not use."""
        yield from self._check_ids()
        yield from self._check_condition()
        if self.streams == "one" and self.variant != "p2p":
            yield "objective.streams", f"one is for variant p2p, not {self.variant}"

    def _check_ids(self) -> Iterator[ConfigIssue]:
        if self.variant == "p2p":
            unused = {
                "vocabulary_size": self.vocabulary_size is not None,
                "tokenizer": self.tokenizer is not None and self.condition_size is None,
            }
            for key in [name for name, given in unused.items() if given]:
                yield f"objective.{key}", "belongs to the variants p2d and d2d; leave it out"
        elif self.vocabulary_size is None:
            text = f"must be given for {self.variant}: how many ids the tokenizer has"
            yield "objective.vocabulary_size", text
        if self.variant == "p2d" and self.tokenizer is None:
            yield "objective.tokenizer", "must name the run folder of the tokenizer"
        if self.variant != "p2p" and self.normalize_targets:
            text = f"is for pixels, and {self.variant} predicts ids; set it to false"
            yield "objective.normalize_targets", text

    def _check_condition(self) -> Iterator[ConfigIssue]:
        if self.condition_size is None:
            return
        if self.tokenizer is None:
            yield "objective.tokenizer", "must name the run folder whose features are the condition"
        if self.num_condition_tokens != 1:
            text = "must be 1 with condition_size: the mean of the features is one token"
            yield "objective.num_condition_tokens", text
        if self.variant != "p2p":
            yield "objective.condition_size", "belongs to the variant p2p, as in appendix E"

    def grammar(self, run: RunConfig) -> Grammar:
        """Return groups predicted by queries (sections 3.2 and 4.2), given y_extra (4.1)."""
        patches = Patches(patch_size=self.patch_size)
        ids, pixels = None, SquaredError(normalize=self.normalize_targets)
        if self.vocabulary_size is not None:
            size, name = self.vocabulary_size, self.tokenizer
            ids = Ids(patch_size=self.patch_size, vocabulary_size=size, tokenizer=name)
        condition: AnyCondition = LearnedTokens(count=self.num_condition_tokens)
        if self.condition_size is not None:
            assert self.tokenizer is not None
            condition = PooledFeatures(tokenizer=self.tokenizer, feature_size=self.condition_size)
        return Grammar(
            reads=ids if ids and self.variant == "d2d" else patches,
            predicts=ids if self.variant == "p2d" else None,
            schedule=Groups(
                length=self.segmentation,
                num_groups=self.num_groups,
                boundaries=self.boundaries,
                order=self.order,
                feature_order=self.feature_order,
            ),
            asks=Query(start=False, streams=self.streams),
            density=Categorical() if ids else pixels,
            condition=condition,
            positions=run.model.positions or "sincos",
        )
