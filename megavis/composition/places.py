"""Interface of a model that predicts the position of every patch, for figures and accuracies.

Legend: b images, n patches of an image and places, c of them seen, d numbers of a patch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from megavis.composition.asking import Asking, InContext
from megavis.composition.tokens import Frames, Patches, Tokens
from megavis.densities.density import Density
from megavis.densities.place import Place
from megavis.schedules.context import Context
from megavis.schedules.schedule import Schedule


@dataclass(frozen=True)
class Places:
    """What is cut, what is seen, and how a place is predicted."""

    reads: Frames | Patches
    schedule: Context
    asks: InContext
    density: Place

    @classmethod
    def of(cls, reads: Tokens, schedule: Schedule, asks: Asking, density: Density) -> Places | None:
        """Return the words of a composition as such a model's; None where it names no places."""
        if not isinstance(density, Place):
            return None
        assert isinstance(reads, Frames | Patches)
        assert isinstance(schedule, Context)
        assert isinstance(asks, InContext)
        return cls(reads, schedule, asks, density)

    @property
    def num_places(self) -> int:
        """Patches n of an image, and places that each may have come from."""
        return self.schedule.num_positions

    @property
    def num_placed(self) -> int:
        """How many, the first of the context, are given their positions."""
        return self.schedule.num_placed

    @property
    def mask_ratio(self) -> float:
        """Share of the patches that training does not let others see."""
        return self.schedule.mask_ratio

    def patches_of(self, images: Tensor) -> Tensor:
        """Cut samples into patches float32 `[b, n, d]`; raises UserError for other samples."""
        return self.reads.of(images)

    def images_of(self, patches: Tensor) -> Tensor:
        """Undo `patches_of`; raises UserError where patches are frames."""
        return self.reads.to_images(patches)

    def context_of(self, sample_index: Tensor, mask_ratio: float) -> Tensor:
        """Draw which patches of samples `[b]` are seen: int64 `[b, c]`, without repetition."""
        plan = self.schedule.draw(sample_index, mask_ratio)
        return plan.order[:, : plan.num_content]

    def inputs_with(self, patches: Tensor, context: Tensor) -> tuple[Tensor, ...]:
        """Return the inputs for any patches `[b, n, d]` of which `context` `[b, c]` are seen."""
        return self.asks.rows_of(patches, context, self.num_placed)

    def outputs(self, predictions: Any) -> Tensor:
        """Return a logit for each place of each patch: `[b, n, n]`."""
        return self.density.outputs(predictions)
