"""What GIVT's causal and masked models share: labels, the density of a token, and its loss.

"GIVT: Generative Infinite-Vocabulary Transformers", sections 3.2 and 3.3, appendices B and C. Where
latents come from stands in `givt_latents.py`.

Legend: b images, n tokens, d numbers of a token, k components, c channels and h, w of the latents.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor, nn

from megavis.config.choices import PositionKind
from megavis.config.errors import UserError
from megavis.data.batch import Batch
from megavis.data.manifest import Manifest
from megavis.densities.gaussians import CorrelatedGaussian, GaussianMixture, Gaussians, Predictions
from megavis.model.init import Initialization, truncated_normal, xavier_uniform
from megavis.model.mixture import ScaleForm
from megavis.model.positions import carried_names
from megavis.objectives.generates import Condition, Known
from megavis.objectives.givt_config import NO_NULL_LABEL
from megavis.objectives.givt_latents import LatentSource
from megavis.objectives.givt_layers import TOKENS, DensityHead, LatentEmbedding
from megavis.parallel.random import normal, uniform
from megavis.schedules.orders import Orders
from megavis.tokenizers.latents import stack, to_tokens


class Labels(Condition):
    """The class of an image, where the model has classes."""

    names: tuple[str, ...] = ("labels",)

    def __init__(self, paper: LatentTokens) -> None:
        self.paper = paper

    def given(self, values: Mapping[str, Tensor], count: int, device: torch.device) -> Known:
        """Return the rows of the labels int64 `[b]`; of the null label where none are named."""
        super().given(values, count, device)
        return (self.paper.label_rows(values.get("labels"), count, device),)

    def nothing(self, known: Known) -> Known:
        """Return the null label's row for each image."""
        if not self.paper.has_null_label:
            return super().nothing(known)
        rows, *others = known
        return torch.full_like(rows, self.paper.null_row), *others

    def balanced(self, numbers: Tensor) -> Mapping[str, Tensor]:
        """Return classes that take turns."""
        classes = self.paper.num_classes
        return {"labels": numbers % classes} if classes else {}

    def usual(self, num_images: int, examples: Batch | None) -> Mapping[str, Tensor]:
        """Return classes evenly spread, equals together."""
        classes = self.paper.num_classes
        if not classes:
            return {}
        return {"labels": torch.arange(num_images) * classes // num_images}


class LatentTokens(LatentSource):
    """Real-valued tokens, each predicted as a density."""

    num_special_rows = 0
    """Rows of the table of labels between the classes and the null label."""
    num_skipped = 0
    """Tokens in front of which nothing is predicted."""
    usual_share = 0.0

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

    @cached_property
    def density(self) -> Gaussians:
        """A mixture of Gaussians, or one with a full covariance."""
        paper = self.paper
        if paper.covariance == "full":
            return CorrelatedGaussian(
                paper.num_outputs, self.scale_form, build_head=self._build_head
            )
        return GaussianMixture(
            paper.num_outputs,
            self.scale_form,
            num_components=paper.num_components,
            build_head=self._build_head,
        )

    @property
    def scale_form(self) -> ScaleForm:
        """From outputs to scales."""
        return ScaleForm(self.paper.scale_activation, self.paper.scale_floor)

    def _build_head(self) -> DensityHead:
        return DensityHead(self.core, self.paper, num_skipped=self.num_skipped)

    @cached_property
    def orders(self) -> Orders:
        """Raster order."""
        return Orders(torch.arange(self.num_tokens))

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

    def nats(self, predictions: Predictions, targets: tuple[Tensor, ...]) -> Tensor:
        """Return -log p of each token, float32 `[b, n]`; an adapter's tokens take the targets'."""
        tokens = targets[0] if isinstance(predictions, Tensor) else None
        return self.density.per_token_loss(predictions, tokens)

    # What `Generates` asks for.

    @cached_property
    def condition(self) -> Condition:
        """The class."""
        return Labels(self)

    def blank_tokens(self, images: Tensor) -> Tensor:
        """Return tokens `[b, n, d]` of zeros."""
        return torch.zeros(len(images), self.num_tokens, self.token_size, device=images.device)

    def tokens_of(self, inputs: Tensor, index: Tensor | None = None) -> Tensor:
        """Return latents `[b, c, h, w]`, drawn from mean and scale where these are stored."""
        return self.latents(inputs, index)

    def prior(self, images: Tensor, *, seed: int) -> Tensor:
        """Draw latents `[b, c, h, w]` from N(0, 1), what the VAE takes the world for."""
        shape = self.latent_shape
        count = shape[0] * shape[1] * shape[2]
        return normal(images, count, seed=seed, purpose="prior").view(-1, *shape)

    def transform(self, layer: nn.Module, tokens: Tensor) -> Tensor:
        """Return tokens `[b, n, d]` of latents.

        Raises:
            UserError: an adapter mixes all latents, so that a part of its tokens knows the rest.
        """
        if self.paper.adapter_blocks:
            raise UserError(
                "with objective.adapter_blocks a token depends on the whole image: no part of an"
                " image can be given"
            )
        assert isinstance(layer, LatentEmbedding)
        return layer.tokens(tokens)

    def undo(self, layer: nn.Module, tokens: Tensor) -> Tensor:
        """Return the latents `[b, c, h, w]` of tokens `[b, n, d]`."""
        assert isinstance(layer, LatentEmbedding)
        return layer.latents(tokens)

    def check_images(self, folder: Path) -> None:
        """Raise UserError where the config names no VAE, or one that does not fit."""
        self.decode(torch.zeros(1, *self.latent_shape))

    def to_images(self, tokens: Tensor, folder: Path) -> Tensor:
        """Return images of latents; raises UserError where the config names no VAE."""
        return self.decode(tokens)
