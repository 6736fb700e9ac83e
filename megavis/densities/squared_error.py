"""Numbers predicted by their squared error, the mean of a Gaussian of unit variance.

Legend: b images, q predicted positions, d numbers of a token.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor, nn

from megavis.config.errors import UserError
from megavis.densities.decoders import NO_DECODER, DecoderWork
from megavis.densities.density import Density, Drawing, Drawn, Draws, for_each_key
from megavis.model.heads import Head
from megavis.model.layer_state import PackedState
from megavis.tokenizers.patches import normalize_patches, with_statistics_of


class SquaredError(Density):
    """One prediction a number; what is drawn is the mean."""

    def __init__(
        self,
        num_outputs: int,
        *,
        normalize: bool,
        num_skipped: int = 0,
        build_head: Callable[[], Head],
        decoder: DecoderWork = NO_DECODER,
    ) -> None:
        """Build.

        Args:
            num_outputs: d.
            normalize: score each token against its target standardised by itself ("Masked
                Autoencoders Are Scalable Vision Learners", section 4, normalized pixels).
            num_skipped: rows in front whose predictions count nothing.
            build_head: the last layer, which gives `[b, num_skipped + q, d]`.
            decoder: see `Density`.
        """
        self.num_outputs, self.normalize, self._build = num_outputs, normalize, build_head
        self.num_skipped, self.decoder = num_skipped, decoder

    def build_head(self) -> Head:
        """Return the last layer."""
        return self._build()

    def per_token_loss(self, predictions: Tensor, targets: Tensor) -> Tensor:
        """Return the squared error a number: `[b, q]`.

        Args:
            predictions: `[b, num_skipped + q, d]`.
            targets: likewise, not yet standardised.
        """
        if self.normalize:
            targets = normalize_patches(targets)
        return (self.outputs(predictions).float() - targets).square().mean(-1)

    def outputs(self, predictions: Tensor) -> Tensor:
        """Return the predictions `[b, q, d]`."""
        return predictions[:, self.num_skipped :]

    def restored(self, predictions: Tensor, targets: Tensor) -> Tensor:
        """Return the predictions, with mean and deviation of the targets where standardised."""
        predicted = self.outputs(predictions).float()
        return with_statistics_of(targets, predicted) if self.normalize else predicted

    def drawing(self, options: object, *, scored: bool) -> Drawing:
        """Return what draws the mean.

        Raises:
            UserError: each prediction is standardised by itself.
        """
        if self.normalize:
            raise UserError(
                "patches predicted with objective.normalize_targets have no brightness and"
                " contrast, so no image can be drawn; train without it to draw"
            )
        return _TakesMean()


@dataclass(frozen=True)
class _TakesMean(Drawing):
    def __call__(self, head: nn.Module, state: PackedState, draws: Draws) -> Drawn:
        predictions = head(state)[:, -draws.keys.shape[1] :].float()
        return Drawn(for_each_key(predictions, draws))
