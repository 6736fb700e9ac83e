"""Schedules and arrangements: which tokens are known when each token is predicted.

A schedule draws an arrangement for each training sample, provides the one for features, and steps
through one to generate images.

Legend: b images (1 if all images share a tensor), n positions of the sequence.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch.nn.functional as F
from torch import Tensor

from megavis.config.errors import UserError
from megavis.config.section import LossAverage


@dataclass(frozen=True)
class NoOptions:
    """Options of a density or schedule that has none."""


class Schedule(ABC):
    """Draws arrangements for training, and steps through one to generate."""

    options_type: type = NoOptions
    """Dataclass of the user's options of generation."""
    takes_given: ClassVar[bool] = True
    """True if generation can start from given tokens."""
    needs_score: ClassVar[bool] = False
    """True if the next step depends on the log-likelihood of the sampled tokens."""
    is_sequential: ClassVar[bool] = False
    """True if each token is predicted from all tokens before it."""
    loss_average: LossAverage = "images"
    """`images`: average over the predicted tokens of each image, and then over images. `batch`:
    divide the sum over all predicted tokens of a step by their number."""

    def samples_one(self, options: Any) -> bool:
        """Return whether each step samples one position and none twice, with these options."""
        return self.is_sequential

    @property
    def needs_given(self) -> bool:
        """True if generation must start from given tokens."""
        return False

    @property
    def given_share(self) -> float:
        """Share of each image that is given in grids of completed images."""
        return 0.5

    @property
    def columns(self) -> tuple[Mapping[str, Any], ...]:
        """Options of each column in a grid of completed images; one column of defaults."""
        return ({},)

    @property
    def is_random(self) -> bool:
        """True if the predicted tokens differ from draw to draw, so that evaluation is noisy."""
        return False

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the choices that `chosen` accepts."""
        return ()

    def at(self, step: int | None) -> Schedule:
        """Return the schedule of an optimizer step, from 0; None: the schedule outside training.

        By default it is the same in all steps.
        """
        return self

    @abstractmethod
    def draw(self, index: Tensor) -> Arrangement:
        """Return the training arrangement of samples `index`, int64 `[b]`."""

    def num_predicted(self, index: Tensor) -> Tensor:
        """Return the number of predicted tokens of samples `[b]`, float32 `[b]`, without masks.

        Needed for a `loss_average` of `batch`, where every process counts the whole step.
        """
        raise NotImplementedError

    @property
    def expected_predicted(self) -> float:
        """The expectation of `num_predicted`; needed for a `loss_average` of `batch`."""
        raise NotImplementedError

    def chosen(self, index: Tensor, choices: Mapping[str, Any], *, is_named: bool) -> Arrangement:
        """Return the arrangement for a user's own data.

        Args:
            index: int64 `[b]`, the samples whose draws determine what is not chosen.
            choices: values by name; names not in `names` are ignored.
            is_named: whether the user passed these samples; if not, nothing need be masked.

        Raises:
            UserError: a choice is invalid.
        """
        return self.draw(index)

    @property
    def has_random_features(self) -> bool:
        """True if the arrangement for features is drawn."""
        return False

    @abstractmethod
    def for_features(self, index: Tensor) -> Arrangement:
        """Return the arrangement for features of samples `index`, int64 `[b]`."""

    def order_of(self, images: Tensor, *, seed: int) -> Tensor:
        """Return the order in which images `[b]` are generated: int64 `[b or 1, n]`."""
        raise UserError("this schedule does not generate")

    def first(self, order: Tensor, *, num_given: int, options: Any) -> Step | None:
        """Return the first step of generation; None if all tokens are given."""
        raise UserError("this schedule does not generate")

    def share_done(self, step: Step, options: Any) -> float:
        """Return the share of the generation before a step, in [0, 1); by default of positions."""
        return float(step.asked.start / step.arrangement.num_positions)

    def share_known(self, step: Step, options: Any) -> float:
        """Return the share of the tokens known after a step, in (0, 1]; by default of positions."""
        return float(step.asked.stop / step.arrangement.num_positions)

    def after(self, step: Step, progress: GenerationProgress, options: Any) -> Step | None:
        """Return the step after `step`; None at the end."""
        raise UserError("this schedule does not generate")


@dataclass(frozen=True)
class Arrangement:
    """An order of the tokens, and the group in which each is predicted.

    The bounds are Python integers, equal on all ranks, so that no step waits for the device.

    Attributes:
        order: int64 `[b or 1, n]`, the token (in raster order) at each position.
        groups: int64 `[b or 1, n]`, by position: group 0 is given, group g > 0 is predicted from
            the groups before it.
        num_content: other tokens may attend to positions `[0, num_content)`.
        first_asked: positions `[first_asked, n)` are predicted in some image.
        num_given: positions `[0, num_given)` are given in generation.
        num_placed: positions `[0, num_placed)` get their position in the image.
        num_idle: trailing rows of training that predict nothing, since they hold the last tokens.
        predicts_all: every position is predicted in every image, and no row is idle.
    """

    order: Tensor
    groups: Tensor
    num_content: int
    first_asked: int = 0
    num_given: int = 0
    num_placed: int = 0
    num_idle: int = 0
    predicts_all: bool = False

    @property
    def num_positions(self) -> int:
        """Positions n."""
        return self.order.shape[1]

    @property
    def prediction_targets(self) -> PredictionTargets:
        """All predicted positions at once, as in training, and those of idle rows after the end."""
        stop = self.num_positions + self.num_idle
        return PredictionTargets(self, self.num_content, slice(self.first_asked, stop))

    @property
    def is_predicted(self) -> Tensor:
        """Mask bool `[b or 1, q]`, true where the loss counts; q includes idle rows."""
        return F.pad(self.groups[:, self.first_asked :] > 0, (0, self.num_idle))


@dataclass(frozen=True)
class PredictionTargets:
    """The known positions of a sequence, and those to predict.

    Attributes:
        arrangement: order and groups, `[1, n]` or `[b, n]`.
        known: positions `[0, known)` hold known tokens.
        asked: the positions to predict, a contiguous range.
        hidden: bool `[b or 1, n]`, true where the token is masked, for schedules that do not follow
            an order; by default where the arrangement's groups are above 0.
    """

    arrangement: Arrangement
    known: int
    asked: slice
    hidden: Tensor | None = field(default=None, kw_only=True)


@dataclass(frozen=True)
class Step(PredictionTargets):
    """One step of generation, which samples the asked positions.

    Attributes:
        number: index of the step, from 0.
        name: purpose of the step's random draws.
        num_given: positions that were given before the first step.
    """

    number: int
    name: str
    num_given: int = field(default=0, kw_only=True)

    @property
    def num_asked(self) -> int:
        """Number of positions sampled in this step."""
        return int(self.asked.stop - self.asked.start)


@dataclass(frozen=True)
class GenerationProgress:
    """Inputs from which a schedule chooses the next step.

    Attributes:
        score: log-likelihood of the tokens just sampled, float32 `[b, positions]`.
        images: int64 `[b]`, indices of the images; draws are functions of seed and index.
    """

    score: Tensor | None
    images: Tensor
    seed: int
