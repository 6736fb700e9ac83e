"""What generation asks of a paper whose images can be drawn.

Legend: b images, n positions of the sequence, p positions given, H and W pixels.
"""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

from torch import Tensor, nn

from megavis.composition.condition import Condition, Known
from megavis.config.schema import RunConfig
from megavis.densities.base import Density
from megavis.schedules.base import Question, Schedule


class Generates(Protocol):
    """A paper whose images can be drawn, in the words of its composition."""

    config: RunConfig

    @property
    def num_tokens(self) -> int:
        """Positions n."""

    @property
    def schedule(self) -> Schedule:
        """Which positions are drawn when."""

    @property
    def density(self) -> Density:
        """How a token is drawn."""

    @property
    def condition(self) -> Condition:
        """What else is known."""

    @property
    def keeps_keys(self) -> bool:
        """True where the keys and values of a token do not change as others follow."""

    @property
    def num_copies(self) -> int:
        """Times that each column is drawn, each with draws of its own."""

    @property
    def usual_share(self) -> float:
        """Share of an image that is given in pictures of a run; 0: none."""

    def blank_tokens(self, images: Tensor) -> Tensor:
        """Return tokens `[b, n, ...]` of zeros for images `[b]`, on their device."""

    def tokens_of(self, inputs: Tensor, index: Tensor | None = None) -> Tensor:
        """Return tokens in raster order, as the tokenizer gives them, of what shards hold.

        Args:
            inputs: of `Batch`.
            index: int64 `[b]`, of the samples; decides draws of the tokenizer, where it draws.

        Raises:
            UserError: the inputs have another form.
        """

    def prior(self, images: Tensor, *, seed: int) -> Tensor | None:
        """Draw tokens as the tokenizer's training assumed them; None where it assumed nothing."""

    def rows(
        self, tokens: Tensor, question: Question, known: Known, since: int = 0
    ) -> tuple[Tensor, ...]:
        """Return what the first layer takes to predict the positions that are asked for.

        Args:
            tokens: `[r, n, ...]` in the order of generation.
            question: its plan has one row, or r.
            known: the condition.
            since: positions whose keys and values are kept.
        """

    def transform(self, layer: nn.Module, tokens: Tensor) -> Tensor:
        """Return tokens `[b, n, ...]` in raster order as the model predicts them.

        Args:
            layer: the first layer, which may hold a learned transform.
            tokens: as the tokenizer gives them.

        Raises:
            UserError: a part of the tokens does not follow from the same part of an image.
        """

    def undo(self, layer: nn.Module, tokens: Tensor) -> Tensor:
        """Undo `transform`."""

    def check_images(self, folder: Path) -> None:
        """Raise UserError where nothing makes images of the tokens, before any are drawn."""

    def to_images(self, tokens: Tensor, folder: Path) -> Tensor:
        """Return images uint8 `[b, H, W, 3]` of tokens as `undo` gives them.

        Args:
            tokens: in raster order.
            folder: of the run, which may hold what decodes them.

        Raises:
            UserError: nothing decodes them.
        """
