"""Interface of a model that predicts the position of every patch, for figures and accuracies.

Legend: b images, n patches and positions of an image, c patches in the context, d values of a
patch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from megavis.composition.asking import Asking, InContext
from megavis.composition.tokens import Frames, Patches, Tokens
from megavis.densities.categorical import Place
from megavis.densities.density import Density
from megavis.schedules.masked import RandomMasking
from megavis.schedules.schedule import Schedule


@dataclass(frozen=True)
class Places:
    """The choices of a paper that predicts positions."""

    reads: Frames | Patches
    schedule: RandomMasking
    asks: InContext
    density: Place

    @classmethod
    def of(cls, reads: Tokens, schedule: Schedule, asks: Asking, density: Density) -> Places | None:
        """Return the given choices of a paper; None if it does not predict positions."""
        if not isinstance(density, Place):
            return None
        assert isinstance(reads, Frames | Patches)
        assert isinstance(schedule, RandomMasking)
        assert isinstance(asks, InContext)
        return cls(reads, schedule, asks, density)

    @property
    def num_places(self) -> int:
        """Patches and positions n of an image."""
        return self.schedule.num_positions

    @property
    def num_placed(self) -> int:
        """Number of context patches, the first ones, that get their position."""
        return self.schedule.num_placed

    @property
    def mask_ratio(self) -> float:
        """Share of the patches outside the context in training."""
        return self.schedule.mask_ratio

    def patches_of(self, images: Tensor) -> Tensor:
        """Cut samples into patches float32 `[b, n, d]`; raise UserError if they do not fit."""
        return self.reads.of(images)

    def images_of(self, patches: Tensor) -> Tensor:
        """Invert `patches_of`; raise UserError for frames of a spectrogram."""
        return self.reads.to_images(patches)

    def context_of(self, sample_index: Tensor, mask_ratio: float) -> Tensor:
        """Draw the context of samples `[b]`: int64 `[b, c]`, distinct patches."""
        plan = self.schedule.draw(sample_index, mask_ratio)
        return plan.order[:, : plan.num_content]

    def inputs_with(self, patches: Tensor, context: Tensor) -> tuple[Tensor, ...]:
        """Return model inputs for patches `[b, n, d]` with the context int64 `[b, c]`."""
        return self.asks.rows_of(patches, context, self.num_placed)

    def outputs(self, predictions: Any) -> Tensor:
        """Return the position logits of each patch, `[b, n, n]`."""
        return self.density.outputs(predictions)
