"""GIVT-MaskGIT: some of the latents are hidden and predicted from the rest.

"GIVT: Generative Infinite-Vocabulary Transformers", section 3.2, after "MaskGIT" (Chang et al.,
2022): the share of hidden tokens is drawn for each image, cos(π/2 · u).

Legend: b images, n tokens, d numbers of a token.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from megavis.data.batch import Batch
from megavis.densities.gaussians import Predictions
from megavis.model.flops import Workload
from megavis.model.visibility import Kind
from megavis.objectives.base import Sequence
from megavis.objectives.generates import Known
from megavis.objectives.givt_base import LatentTokens
from megavis.objectives.givt_layers import MaskedEmbedding
from megavis.objectives.givt_maskgit_config import MaskGITConfig
from megavis.schedules.base import Step
from megavis.schedules.masked import Rounds


class GIVTMaskGIT(LatentTokens):
    """Prediction of hidden latents."""

    config_type = MaskGITConfig
    num_special_rows = 3
    num_skipped = 1

    @property
    def masked(self) -> MaskGITConfig:
        """The paper's section of the config."""
        assert isinstance(self.config.objective, MaskGITConfig)
        return self.config.objective

    @property
    def visibility_kind(self) -> Kind:
        """All see all."""
        return "full"

    def workload(self) -> Workload:
        """Count the label as well."""
        return Workload.of_one_stream(self.num_tokens + 1, self.num_outputs, causal=False)

    def build_embedding(self) -> MaskedEmbedding:
        """Return labels, latents, marks of what is hidden, and positions."""
        return MaskedEmbedding(
            self.core, self.masked, self.position_kind, num_rows=self.num_label_rows
        )

    @cached_property
    def schedule(self) -> Rounds:
        """A share of the tokens is hidden; images are drawn in rounds."""
        return Rounds(self.orders, least_masking=self.masked.least_masking, seed=self.config.seed)

    def generation(self) -> GIVTMaskGIT:
        """Return itself."""
        return self

    def rows(self, tokens: Tensor, step: Step, known: Known, since: int) -> tuple[Tensor, ...]:
        """Return all tokens, rows of the labels, and which tokens are hidden."""
        assert step.hidden is not None
        (rows,) = known
        return tokens.masked_fill(step.hidden[..., None], 0.0), rows, step.hidden

    def sequence(self, batch: Batch) -> Sequence:
        """Draw latents and mask, and drop some labels."""
        latents = self.latents(batch.inputs, batch.sample_index)
        mask = self.schedule.draw(batch.sample_index).is_predicted
        inputs = (latents, self.training_rows(batch), mask)
        return Sequence(inputs, (*self.plain_targets(latents), mask))

    def inputs_from(
        self,
        inputs: Any,
        *,
        labels: Tensor | None = None,
        mask: Tensor | None = None,
        sample_index: Tensor | None = None,
        **_: Any,
    ) -> tuple[Tensor, ...]:
        """Return what the first layer takes.

        Args:
            inputs: as `latents` takes them. Tokens pass the adapter by.
            labels: int64 `[b]`; -1 or None: no class.
            mask: bool `[b, n]`, true where a token is hidden; nothing when absent.
            sample_index: as `latents` takes it.

        Raises:
            UserError: a shape or a label is wrong.
        """
        latents = self.latents(inputs, sample_index)
        rows = self.label_rows(labels, len(latents), latents.device)
        if mask is None:
            mask = torch.zeros(len(latents), self.num_tokens, dtype=torch.bool)
        return latents, rows, mask.to(latents.device)

    def loss(self, predictions: Predictions, targets: tuple[Tensor, ...]) -> Tensor:
        """Return nats a hidden token, the mean over each image's and then over the images.

        The released code weighs every hidden token of the batch alike, which would make the loss
        depend on how a batch is cut into parts.
        """
        mask = targets[-1]
        nats = self.nats(predictions, targets) * mask
        return (nats.sum(1) / mask.sum(1).clamp(min=1)).mean()
