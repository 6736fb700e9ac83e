"""Squared error of real-valued tokens, which models a Gaussian with unit variance.

Legend: b images, q predicted positions, d values of a token.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from torch import Tensor, nn

from megavis.config.errors import UserError
from megavis.densities.density import (
    NO_DECODER,
    UNSCORED,
    DecoderWork,
    Density,
    Samples,
    SamplingKeys,
    TokenSampler,
    for_each_key,
)
from megavis.model.heads import Head
from megavis.model.layer_state import PackedState
from megavis.tokenizers.patches import normalize_patches, with_statistics_of


class SquaredError(Density):
    """Mean squared or absolute error; sampling returns the prediction.

    Args:
        norm: `l2`, squared error, or `l1`, absolute error ("SimMIM: a Simple Framework for Masked
            Image Modeling", section 3.4).
        normalize: standardise each target by its own mean and standard deviation ("Masked
            Autoencoders Are Scalable Vision Learners", section 4, normalized pixels).
        build_head: builds the last layer, which returns `[b, q, d]`.
    """

    predicts_tokens = True

    def __init__(
        self,
        num_outputs: int,
        *,
        norm: Literal["l2", "l1"] = "l2",
        normalize: bool,
        build_head: Callable[[], Head],
        decoder: DecoderWork = NO_DECODER,
    ) -> None:
        super().__init__(num_outputs, build_head)
        self.norm, self.normalize, self.decoder = norm, normalize, decoder

    def per_token_loss(self, predictions: Tensor, targets: Tensor) -> Tensor:
        """Return the mean error over the values of each token, `[b, q]`."""
        if self.normalize:
            targets = normalize_patches(targets)
        errors = predictions.float() - targets
        return (errors.abs() if self.norm == "l1" else errors.square()).mean(-1)

    def restored(self, predictions: Tensor, targets: Tensor) -> Tensor:
        """Return the predictions, with the targets' mean and standard deviation if normalised."""
        predicted = predictions.float()
        return with_statistics_of(targets, predicted) if self.normalize else predicted

    def token_sampler(self, options: object, *, scored: bool) -> TokenSampler:
        """Return a sampler of the mean; raise UserError if `scored`: all are equally likely."""
        if scored:
            raise UserError(UNSCORED.format("squared error"))
        return _MeanPrediction()


@dataclass(frozen=True)
class _MeanPrediction(TokenSampler):
    def __call__(self, head: nn.Module, state: PackedState, draws: SamplingKeys) -> Samples:
        predictions = head(state)[:, -draws.keys.shape[1] :].float()
        return Samples(for_each_key(predictions, draws))
