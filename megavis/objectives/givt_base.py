"""What GIVT's causal and masked models share: labels, the density of a token, and its loss.

"GIVT: Generative Infinite-Vocabulary Transformers", sections 3.2 and 3.3, appendices B and C. Where
latents come from stands in `givt_latents.py`.

Legend: b images, n tokens, d numbers of a token, k components, c channels and h, w of the latents.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from megavis.config.choices import PositionKind
from megavis.config.errors import UserError
from megavis.data.batch import Batch
from megavis.data.manifest import Manifest
from megavis.model.init import Initialization, truncated_normal, xavier_uniform
from megavis.model.mixture import Distribution, FullGaussian, Mixture, ScaleForm
from megavis.model.positions import carried_names
from megavis.objectives.givt_config import NO_NULL_LABEL
from megavis.objectives.givt_latents import LatentSource
from megavis.objectives.givt_layers import TOKENS, LatentEmbedding
from megavis.parallel.random import uniform
from megavis.tokenizers.latents import stack, to_tokens

Predictions = Tensor | tuple[Tensor, Tensor]


class LatentTokens(LatentSource):
    """Real-valued tokens, each predicted as a density."""

    num_special_rows = 0
    """Rows of the table of labels between the classes and the null label."""

    @property
    def position_kind(self) -> PositionKind:
        """Learned positions, unless the config says otherwise."""
        return self.config.model.positions or "learned"

    @property
    def carries(self) -> tuple[str, ...]:
        """The adapter's tokens, on their way to the loss; coordinates for rotary positions."""
        adapted = (TOKENS,) if self.paper.adapter_blocks else ()
        return (*adapted, *carried_names(self.position_kind))

    @property
    def carries_gradient(self) -> bool:
        """The adapter learns from the loss on the tokens that it gives."""
        return self.paper.adapter_blocks > 0

    @property
    def num_outputs(self) -> int:
        """Parameters of the density of a token."""
        return self.paper.num_outputs

    @property
    def num_classes(self) -> int:
        """Classes of the labels; 0 where there are none."""
        return self.paper.num_classes

    @property
    def has_null_label(self) -> bool:
        """True where a label stands for no class."""
        return self.paper.has_null_label

    def initialization(self) -> Initialization:
        """Return the released code's: LeCun's for attention, Xavier's for the MLP."""
        lecun = truncated_normal(self.config.model.hidden_size**-0.5)
        return Initialization(lecun, lecun, lecun, xavier_uniform, xavier_uniform)

    def check_data(self, manifest: Manifest) -> Iterator[str]:
        """Want what latents come from, and labels that the table has."""
        yield from super().check_data(manifest)
        yield from self._check_labels(len(manifest.class_names))

    def _check_labels(self, num_given: int) -> Iterator[str]:
        wanted = self.paper.num_classes
        if num_given > wanted > 0:
            yield f"has {num_given} classes; objective.num_classes is {wanted}"
        if wanted and not num_given:
            yield "has no labels; set objective.num_classes to 0, or give labelled shards"

    @property
    def missing_null_label(self) -> str | None:
        """A sentence where the table of labels has classes and no null label."""
        if self.paper.has_null_label or not self.paper.num_classes:
            return None
        return f"objective.label_dropout {NO_NULL_LABEL}"

    @property
    def has_random_sequence(self) -> bool:
        """Latents are drawn from the VAE's posterior (section 3.1)."""
        return True

    @property
    def has_random_features(self) -> bool:
        """Latents are drawn for features as in training."""
        return True

    def inputs_for_features(
        self, inputs: Tensor, sample_index: Tensor | None
    ) -> tuple[Tensor, ...]:
        """Return all latents, none hidden, with the null label in front."""
        return self.inputs_from(inputs, sample_index=sample_index)

    @property
    def num_label_rows(self) -> int:
        """Rows of the table: classes (or one that stands for all), special ones, null label."""
        classes = self.paper.num_classes or 1
        return classes + self.num_special_rows + int(self.paper.has_null_label)

    @property
    def null_row(self) -> int:
        """Row of the null label; of the only one where there are no classes."""
        if not self.paper.num_classes:
            return 0
        return self.num_label_rows - 1

    def label_rows(self, labels: Tensor | None, count: int, device: torch.device) -> Tensor:
        """Return the table's rows int64 `[b]` of classes `[b]`; -1 and None: no class.

        Raises:
            UserError: a label is out of range, or none is given to a model that wants one.
        """
        if labels is None and not self.needs_labels:
            return torch.full((count,), self.null_row, device=device)
        if not self.paper.num_classes:
            return torch.zeros(count, dtype=torch.int64, device=device)
        labels = torch.full((count,), -1) if labels is None else labels
        lowest = -1 if self.paper.has_null_label else 0
        if int(labels.min()) < lowest or int(labels.max()) >= self.paper.num_classes:
            null = " or -1 for no class" if lowest else ", without a null label"
            raise UserError(f"labels must lie in 0..{self.paper.num_classes - 1}{null}")
        return self._rows(labels.to(device))

    def _rows(self, labels: Tensor) -> Tensor:
        return torch.where(labels < 0, self.null_row, labels)

    def training_rows(self, batch: Batch) -> Tensor:
        """Return the rows `[b]` of a batch's labels, some of them dropped.

        A sample without a label has the null label's.
        """
        if not self.paper.num_classes:
            return torch.zeros_like(batch.labels)
        rows = self._rows(batch.labels)
        if not self.paper.has_null_label:
            return rows
        draws = uniform(batch.sample_index, 1, seed=self.config.seed, purpose="label-dropout")
        return torch.where(draws[:, 0] < self.paper.label_dropout, self.null_row, rows)

    def plain_targets(self, latents: Tensor) -> tuple[Tensor, ...]:
        """Return the tokens to score `[b, n, d]`; none where the adapter gives them."""
        if self.paper.adapter_blocks:
            return ()
        return (to_tokens(stack(latents, self.paper.stacked_latents)),)

    @abstractmethod
    def build_embedding(self) -> LatentEmbedding:
        """Return the first layer."""

    def parameters(self, predictions: Predictions) -> Tensor:
        """Return the parameters of the densities `[b, n, ...]`."""
        return predictions if isinstance(predictions, Tensor) else predictions[0]

    def density(self, parameters: Tensor) -> Distribution:
        """Return the densities, float32, whose parameters these are, `[..., num_outputs]`."""
        form = ScaleForm(self.paper.scale_activation, self.paper.scale_floor)
        if self.paper.covariance == "full":
            return FullGaussian.from_outputs(parameters, form)
        return Mixture.from_outputs(parameters, self.paper.num_components, form)

    def nats(self, predictions: Predictions, targets: tuple[Tensor, ...]) -> Tensor:
        """Return -log p of each token, float32 `[b, n]`."""
        tokens = targets[0] if isinstance(predictions, Tensor) else predictions[1]
        return -self.density(self.parameters(predictions)).log_prob(tokens)

    def outputs(self, predictions: Predictions) -> Tensor:
        """Return the parameters `[b, n, ...]`; with an adapter followed by its tokens."""
        if isinstance(predictions, Tensor):
            return predictions
        return torch.cat([predictions[0].float(), predictions[1].float()], dim=-1)

    def first_layer(self, layer: nn.Module) -> LatentEmbedding:
        """Return the embedding, which holds the adapter."""
        assert isinstance(layer, LatentEmbedding)
        return layer
