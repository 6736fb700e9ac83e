"""Density over the grid positions of a token, with one logit per position.

Legend: b images, n tokens and positions.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from megavis.densities.density import Density
from megavis.model.heads import Head
from megavis.model.kernels import nats


class Place(Density):
    """Cross-entropy over the positions of the grid."""

    def __init__(
        self, num_places: int, *, num_skipped: int, build_head: Callable[[], Head]
    ) -> None:
        """Build.

        Args:
            num_places: n.
            num_skipped: leading tokens without a position, such as a class token.
            build_head: builds the last layer, which returns `[b, num_skipped + n, n]`.
        """
        self.num_outputs, self.num_skipped, self._build = num_places, num_skipped, build_head

    def build_head(self) -> Head:
        """Return the last layer."""
        return self._build()

    def outputs(self, predictions: Tensor) -> Tensor:
        """Return the logits of each token, `[b, n, n]`."""
        return predictions[:, self.num_skipped :]

    def corrupted(
        self, tokens: Tensor, index: Tensor, choices: Mapping[str, Any] | None = None
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Return the true positions int64 `[b, n]` of tokens in raster order."""
        places = torch.arange(tokens.shape[1], device=tokens.device)
        return places.expand(len(tokens), -1), ()

    def per_token_loss(self, predictions: Tensor, targets: Tensor) -> Tensor:
        """Return the cross-entropy of each token in nats, `[b, n]`.

        Args:
            predictions: output of the head.
            targets: true positions int64 `[b, n]`.
        """
        return nats(self.outputs(predictions), targets)

    def measures(self, predictions: Tensor, targets: tuple[Tensor, ...]) -> dict[str, Tensor]:
        """Return top-1 and top-5 accuracy as `accuracy` and `top5`.

        Tokens of weight 0, whose positions are given, are not counted.
        """
        true, *weights = targets
        likeliest = self.outputs(predictions).topk(min(5, self.num_outputs), dim=-1).indices
        hits = (likeliest == true[..., None]).float()
        counted = weights[0] if weights else torch.ones_like(hits[..., 0])
        hits, count = hits * counted[..., None], counted.sum()
        return {"accuracy": hits[..., 0].sum() / count, "top5": hits.sum() / count}
