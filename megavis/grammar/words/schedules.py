"""Schedules: what is known when a token is predicted."""

from __future__ import annotations

import math
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from megavis.config.schema import Fraction, NonNegative, Positive
from megavis.config.section import Above0, LossAverage, Portion, Section
from megavis.grammar.boundaries import Cut, MaskShape, boundary_range, context_size
from megavis.grammar.order import Order


class ScheduleWord(Section):
    """What is known when a token is predicted."""

    kind: str
    generates: ClassVar[bool] = True
    """Whether the schedule has an order of generation."""
    is_sequential: ClassVar[bool] = False
    """Whether it predicts one token at a time."""

    @property
    def num_given(self) -> int:
        """Tokens that are given in every image in training, and never predicted."""
        return 0

    @property
    def differs_by_image(self) -> bool:
        """Whether each image has its own order."""
        return False

    @property
    def needs_seed(self) -> bool:
        """Whether weights are only valid with the `seed` that they were trained with."""
        return False

    @property
    def draws_features(self) -> bool:
        """Whether order or masks of the tokens are drawn for features too."""
        return False

    def is_one_by_one(self, count: int) -> bool:
        """Return whether each of `count` tokens is a group of its own, in a fixed cut."""
        return self.is_sequential

    def content(self, count: int) -> tuple[int, int]:
        """Return how many of `count` tokens rows may attend to, and the first predicted position.

        Both bound all images, since sizes must not depend on random draws.
        """
        return count, 0

    def shown(self, count: int) -> tuple[int, int]:
        """Return how many of `count` tokens are shown in every image, and at most in one.

        For rows that hold shown tokens alone.
        """
        attended, _ = self.content(count)
        return attended, attended


class OneByOne(ScheduleWord):
    """Predict one token at a time."""

    is_sequential: ClassVar[bool] = True

    kind: Literal["one_by_one"] = "one_by_one"
    order: Order = "raster"
    """Order of the tokens: `raster`, `nested_raster`, `round_robin`, `random`, or the raster index
    of the token at each position, as a list or a `.npy` file, whose content is copied into the
    run's config."""
    drawn: Literal["image", "run"] = "image"
    """Draw a `random` order for each image, or one for the run."""
    anneal: Annotated[tuple[Portion, Portion], Field(strict=False)] | None = None
    """Start and end of annealing, as fractions of `training.steps`. Up to the start, each image is
    in its own random order; from the end on, all are in `order`. In between, the share of random
    orders falls linearly from 1 to 0. Outside training, the last step's share is used."""
    order_block: Positive = 2
    """Side of a block in tokens, for `nested_raster` and `round_robin`."""
    prefix: NonNegative | Literal["drawn"] = 0
    """Number of tokens, the first in the order, that are given: they attend to each other, and none
    is predicted. `drawn`: for each image, uniformly from 1 to all but one; for features all tokens
    are the prefix."""

    @property
    def num_given(self) -> int:
        """The prefix, or the shortest one."""
        return 1 if self.prefix == "drawn" else self.prefix

    @property
    def differs_by_image(self) -> bool:
        """Whether each image has its own order, at least at first."""
        return self.anneal is not None or (self.order == "random" and self.drawn == "image")

    @property
    def needs_seed(self) -> bool:
        """Whether the run has drawn its order."""
        return self.order == "random" and self.drawn == "run"

    def content(self, count: int) -> tuple[int, int]:
        """Return all but the last token, and position 0."""
        return count - 1, 0


class Masked(ScheduleWord):
    """Hide random tokens, and predict them from the others."""

    generates: ClassVar[bool] = False
    pretraining_keys: ClassVar[frozenset[str]] = frozenset({"mask_ratio", "count", "shape"})

    kind: Literal["masked"] = "masked"
    mask_ratio: Annotated[float, Field(gt=0, lt=1)] = 0.15
    """Share of the tokens that is hidden."""
    count: Literal["drawn", "exact"] = "drawn"
    """Hide each token with the probability `mask_ratio`, as in BERT; or the same number in every
    image, rounded up, as in SimMIM."""
    shape: MaskShape = "tokens"
    """With an exact count, which tokens are hidden: random `tokens`; random rectangles, as in BEiT
    (`blocks`, the last one cut); or all but one of each 2 × 2 (`grid`)."""
    features: Literal["whole", "masked"] = "whole"
    """Features, and the inputs of fine-tuning: of all tokens, or with tokens hidden as in training,
    "to keep inputs in-distribution" (iGPT, section 4.6)."""

    @property
    def draws_features(self) -> bool:
        """Whether `features` says so."""
        return self.features == "masked"


class Rounds(ScheduleWord):
    """Hide a share of the tokens drawn for each image, and generate in rounds, as in MaskGIT."""

    pretraining_keys: ClassVar[frozenset[str]] = frozenset({"least_masking", "masking_deviation"})

    kind: Literal["rounds"] = "rounds"
    chosen: Literal["confidence", "order"] = "confidence"
    """Which tokens a round of generation keeps. `confidence`: all hidden tokens are sampled, and
    the most likely ones kept. `order`: only the next ones in the image's random order are sampled.
    """
    least_masking: Fraction = 0.0
    """The hidden share is cos(π/2 · u) with u uniform in [0, 1 - least_masking)."""
    masking_deviation: Above0 | None = None
    """Draw the hidden share from a normal distribution around 1 with this standard deviation
    instead, cut to [least_masking, 1]."""
    loss_average: LossAverage = "batch"
    """`batch`: all hidden tokens of a step weigh the same in the loss; `images`: all images do."""

    @property
    def differs_by_image(self) -> bool:
        """Whether tokens are chosen by order."""
        return self.chosen == "order"

    def shown(self, count: int) -> tuple[int, int]:
        """Return 0, and what the smallest hidden share leaves."""
        least, is_normal = self.least_masking, self.masking_deviation is not None
        share = least if is_normal else math.cos(math.pi / 2 * (1.0 - least))
        # The margin is for products such as 0.55 * 20, which exceed 11 in floating point.
        return 0, count - max(1, math.ceil(share * count - 1e-6))


class Groups(ScheduleWord):
    """Predict group by group."""

    kind: Literal["groups"] = "groups"
    length: Cut = "random"
    """How the sequence is cut into groups; `given` uses `boundaries`."""
    num_groups: Positive = 20
    """Number of predicted groups; one more, the first, is given."""
    boundaries: Annotated[tuple[int, ...], Field(strict=False)] | None = None
    """For `given`: the number of tokens up to the end of each group but the last."""
    order: Literal["random", "raster"] = "random"
    """Order of the tokens: drawn for each image, or raster order."""
    feature_order: Literal["raster", "drawn"] = "raster"
    """Order and groups of the tokens for features under the causal mask: raster order with even
    groups up to their mean end in training, without random draws; or drawn as in training."""
    loss_average: LossAverage = "batch"
    """`batch`: all predicted tokens of a step weigh the same in the loss; `images`: all images do,
    whatever the size of their first group."""

    @property
    def draws_features(self) -> bool:
        """Whether `feature_order` says so."""
        return self.feature_order == "drawn"

    def is_one_by_one(self, count: int) -> bool:
        """Return whether `count` groups of fixed length are cut."""
        return (self.length, self.num_groups) == ("fixed", count)

    def content(self, count: int) -> tuple[int, int]:
        """Return the largest end of a group, and the smallest end of the given one."""
        first, last = boundary_range(self.length, count, self.num_groups, self.boundaries)
        return last, first


class Context(ScheduleWord):
    """All tokens attend to a random share of the tokens, the context."""

    generates: ClassVar[bool] = False
    pretraining_keys: ClassVar[frozenset[str]] = frozenset({"mask_ratio", "shape"})

    kind: Literal["context"] = "context"
    mask_ratio: Fraction = 0.75
    """Share of the tokens outside the context."""
    shape: MaskShape = "tokens"
    """Which tokens are outside: random `tokens`; random rectangles, as in BEiT (`blocks`, the last
    one cut); or all but one of each 2 × 2 (`grid`)."""

    def content(self, count: int) -> tuple[int, int]:
        """Return the size of the context, and position 0."""
        return context_size(count, self.mask_ratio), 0


AnySchedule = Context | OneByOne | Masked | Rounds | Groups
