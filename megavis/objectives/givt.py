"""GIVT-Causal: Generative Infinite-Vocabulary Transformers (Tschannen et al., 2024).

An image is the raster sequence of a VAE's real-valued latents. Each token is predicted from those
before it as a mixture of Gaussians in place of logits over a vocabulary (section 3.2); a vector for
the class stands in front.

Legend: b images, n tokens, d numbers of a token.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from megavis.data.batch import Batch
from megavis.densities.gaussians import Predictions
from megavis.model.visibility import Kind
from megavis.objectives.base import Sequence
from megavis.objectives.generates import Known
from megavis.objectives.givt_base import LatentTokens
from megavis.objectives.givt_config import GIVTConfig, LatentTokensConfig
from megavis.objectives.givt_layers import CausalEmbedding
from megavis.objectives.trainable import Likelihood
from megavis.schedules.base import Step
from megavis.schedules.one_by_one import OneByOne


class GIVT(LatentTokens):
    """Next-token prediction of latents."""

    config_type: ClassVar[type[LatentTokensConfig]] = GIVTConfig

    @property
    def visibility_kind(self) -> Kind:
        """Each place sees those before it."""
        return "causal"

    def build_embedding(self) -> CausalEmbedding:
        """Return labels, latents and positions."""
        return CausalEmbedding(
            self.core, self.paper, self.position_kind, num_rows=self.num_label_rows
        )

    @cached_property
    def schedule(self) -> OneByOne:
        """Token after token in raster order."""
        return OneByOne(self.orders)

    def generation(self) -> GIVT:
        """Return itself."""
        return self

    def sequence(self, batch: Batch) -> Sequence:
        """Draw latents and drop some labels."""
        latents = self.latents(batch.inputs, batch.sample_index)
        return Sequence((latents, self.training_rows(batch)), self.plain_targets(latents))

    def inputs_from(
        self,
        inputs: Any,
        *,
        labels: Tensor | None = None,
        sample_index: Tensor | None = None,
        **_: Any,
    ) -> tuple[Tensor, ...]:
        """Return what the first layer takes.

        Args:
            inputs: as `latents` takes them. Tokens pass the adapter by.
            labels: int64 `[b]`; -1 or None: no class.
            sample_index: as `latents` takes it.

        Raises:
            UserError: a shape or a label is wrong.
        """
        latents = self.latents(inputs, sample_index)
        rows = self.label_rows(labels, len(latents), latents.device)
        if latents.ndim == 3:
            return self._places(latents, rows, 0, self.num_tokens)
        return latents, rows

    def rows(self, tokens: Tensor, step: Step, known: Known, since: int) -> tuple[Tensor, ...]:
        """Return the inputs of the places that are not cached, the last of which is asked for.

        Args:
            tokens: `[b, n, d]` as the adapter gives them; those before the asked one are read.
            step: the asked place.
            known: rows of the labels int64 `[b]`, and what an encoder gave.
            since: first place.
        """
        rows, *memory = known
        return *self._places(tokens, rows, since, step.asked.stop), *memory

    def _places(self, tokens: Tensor, rows: Tensor, start: int, stop: int) -> tuple[Tensor, ...]:
        """Return the inputs of the places [start, stop), of which each sees the token before it."""
        before = tokens[:, max(start - 1, 0) : stop - 1]
        if start == 0:
            before = F.pad(before, (0, 0, 1, 0))
        places = torch.arange(start, stop, device=tokens.device)[None]
        return before, rows, places

    @property
    def likelihood(self) -> Likelihood:
        """A token's density is one over its d numbers; the adapter preserves volumes."""
        size, given = self.token_size, None
        if self.num_classes:
            given = f"the class, but for the {self.paper.label_dropout:.0%} that training drops"
        words = "number of the VAE's latents"
        return Likelihood(words, self.num_tokens * size, per_loss=size, given=given)

    def loss(self, predictions: Predictions, targets: tuple[Tensor, ...]) -> Tensor:
        """Return nats a token (equation 2), the mean over tokens and images."""
        return self.nats(predictions, targets).mean()
