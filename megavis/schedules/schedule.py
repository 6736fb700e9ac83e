"""Arrangements: which tokens of an image are known when the others are predicted.

A schedule draws an arrangement for each sample of training, gives the one that features are read
in, and steps through one when images are generated.

Legend: b images (1 where all images share a tensor), n positions of the sequence.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from torch import Tensor

from megavis.config.errors import UserError


@dataclass(frozen=True)
class Arrangement:
    """An order of the tokens, and the group in which each is predicted.

    Bounds are host integers, alike on all ranks, so that no step waits for the device.

    Attributes:
        order: int64 `[b or 1, n]`, the token (in raster order) at each position.
        groups: int64 `[b or 1, n]`, by position: group 0 is given, group g > 0 is predicted from
            the groups before it.
        num_content: positions `[0, num_content)` may be read by others.
        first_asked: positions `[first_asked, n)` are predicted in some image.
        num_given: positions `[0, num_given)` are given when images are generated.
        num_placed: the first positions, whose place in the image is shown.
        predicts_all: every position is predicted in every image.
    """

    order: Tensor
    groups: Tensor
    num_content: int
    first_asked: int = 0
    num_given: int = 0
    num_placed: int = 0
    predicts_all: bool = False

    @property
    def num_positions(self) -> int:
        """Positions n."""
        return self.order.shape[1]

    @property
    def question(self) -> Question:
        """All that is asked for at once, as in training."""
        return Question(self, self.num_content, slice(self.first_asked, self.num_positions))

    @property
    def is_predicted(self) -> Tensor:
        """Return bool `[b or 1, n - first_asked]`: true where the loss counts."""
        return self.groups[:, self.first_asked :] > 0


@dataclass(frozen=True)
class Question:
    """What is known of a sequence, and which of its positions are asked for.

    Attributes:
        plan: order and groups; `[1, n]`, or one row an image.
        known: positions `[0, known)` hold tokens that may be read.
        asked: positions that are predicted, a contiguous range.
        hidden: bool `[b, n]`, for schedules that do not follow an order: true where no token is
            known; where the plan's groups are above 0 when absent.
    """

    plan: Arrangement
    known: int
    asked: slice
    hidden: Tensor | None = field(default=None, kw_only=True)


@dataclass(frozen=True)
class Step(Question):
    """One step of generation: the positions that are asked for are drawn.

    Attributes:
        number: of the step, from 0.
        name: purpose of the step's random draws.
    """

    number: int
    name: str

    @property
    def num_asked(self) -> int:
        """Positions drawn now."""
        return int(self.asked.stop - self.asked.start)


@dataclass(frozen=True)
class NoOptions:
    """For what has nothing to choose."""


@dataclass(frozen=True)
class GenerationProgress:
    """Inputs from which a schedule chooses the next step.

    Attributes:
        score: log-likelihood of the tokens just drawn, float32 `[b, positions]`.
        images: int64 `[b]`, numbers of the images, which with the seed decide random draws.
        seed: of the draws.
    """

    score: Tensor | None
    images: Tensor
    seed: int


class Schedule(ABC):
    """Draws arrangements, and steps through one to generate."""

    options_type: ClassVar[type] = NoOptions
    """Dataclass of what a user may choose when images are generated."""
    takes_given: ClassVar[bool] = True
    """True where generation can start from given tokens."""
    needs_score: ClassVar[bool] = False
    """True where the next step depends on how likely the tokens are that were drawn."""
    is_sequential: ClassVar[bool] = False
    """True where each step draws one position, and no position twice: what beam search needs."""

    @property
    def needs_given(self) -> bool:
        """True where generation starts from given tokens alone."""
        return False

    @property
    def columns(self) -> tuple[Mapping[str, Any], ...]:
        """Options of each column of a picture that is drawn from parts of images: the defaults."""
        return ({},)

    @property
    def is_random(self) -> bool:
        """True where what is asked differs from draw to draw, so that evaluation is a sample."""
        return False

    @property
    def names(self) -> tuple[str, ...]:
        """What can be chosen by name of the arrangement of a user's own data: see `chosen`."""
        return ()

    @abstractmethod
    def draw(self, index: Tensor) -> Arrangement:
        """Return the arrangement of training for samples `index`, int64 `[b]`."""

    def chosen(self, index: Tensor, choices: Mapping[str, Any], *, is_named: bool) -> Arrangement:
        """Return the arrangement of a user's own data.

        Args:
            index: int64 `[b]`, the samples whose draws decide what is not chosen.
            choices: by name; others than `names` are of no meaning here.
            is_named: the user has named these samples; nothing need be hidden where not.

        Raises:
            UserError: a choice does not fit.
        """
        return self.draw(index)

    @property
    def has_random_features(self) -> bool:
        """True where the arrangement of features is drawn."""
        return False

    @abstractmethod
    def for_features(self, index: Tensor) -> Arrangement:
        """Return the arrangement in which features of samples int64 `[b]` are read."""

    def order_of(self, images: Tensor, options: Any, *, seed: int) -> Tensor:
        """Return the order in which images `[b]` are generated: int64 `[b or 1, n]`."""
        raise UserError("this schedule does not generate")

    def first(self, order: Tensor, *, num_images: int, num_given: int, options: Any) -> Step | None:
        """Return the first step of generation; None where all tokens are given."""
        raise UserError("this schedule does not generate")

    def after(self, step: Step, progress: GenerationProgress, options: Any) -> Step | None:
        """Return the step after `step`; None at the end."""
        raise UserError("this schedule does not generate")
