"""GIVT-Causal: Generative Infinite-Vocabulary Transformers (Tschannen et al., 2024).

An image is the raster sequence of a VAE's real-valued latents. Each token is predicted from those
before it as a mixture of Gaussians instead of logits over a vocabulary (section 3.2); a class
embedding comes first.

Legend: d channels of a token, h hidden size.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import ClassVar

import torch
from torch import nn

from megavis.composition.asking import TRANSFORMED, Asking, Shift
from megavis.composition.composition import Composition
from megavis.composition.condition import Condition, Labels
from megavis.composition.encoded_tokens import Latents
from megavis.composition.reader import Role
from megavis.composition.trainable import Likelihood
from megavis.densities.gaussians import CorrelatedGaussian, GaussianMixture, Gaussians
from megavis.model.adapter import Adapter
from megavis.model.embeddings import TokenHead
from megavis.model.gaussian_mixture import ScaleForm
from megavis.model.init import Initialization, normal, truncated_normal, xavier_uniform
from megavis.papers.givt.config import GIVTConfig, LatentTokensConfig
from megavis.schedules.one_by_one import OneByOne
from megavis.schedules.orders import Orders
from megavis.schedules.schedule import Schedule


class GIVT(Composition):
    """Next-token prediction of latents."""

    config_type: ClassVar[type[LatentTokensConfig]] = GIVTConfig
    paper: LatentTokensConfig
    default_positions = "learned"
    default_share = 0.0
    num_special_rows = 0
    """Rows of the table of labels between the classes and the null label."""

    @property
    def has_transform(self) -> bool:
        """True with an adapter (section 3.3)."""
        return self.paper.adapter_blocks > 0

    @cached_property
    def reads(self) -> Latents:
        """Latents, drawn from the VAE's posterior (section 3.1)."""
        paper, size = self.paper, self.config.data.image_size
        return Latents(
            channels=paper.latent_channels,
            side=size // paper.downsampling,
            stacked=paper.stacked_latents,
            seed=self.config.seed,
            tokenizer=paper.tokenizer,
            beta=paper.tokenizer_beta,
            image_size=size,
        )

    @cached_property
    def orders(self) -> Orders:
        """Raster order."""
        return Orders(torch.arange(self.num_tokens))

    @cached_property
    def schedule(self) -> Schedule:
        """One token at a time in raster order."""
        return OneByOne(self.orders)

    @cached_property
    def asks(self) -> Asking:
        """The token before."""
        return Shift("asked")

    @cached_property
    def condition(self) -> Condition:
        """The class."""
        return self._labels()

    def _labels(self) -> Labels:
        return Labels(
            self.paper.num_classes,
            dropout=self.paper.label_dropout,
            seed=self.config.seed,
            num_special_rows=self.num_special_rows,
        )

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
        """The map of outputs to scales."""
        return ScaleForm(self.paper.scale_activation, self.paper.scale_floor)

    def _build_head(self) -> TokenHead:
        return TokenHead(
            self.core,
            self.paper.num_outputs,
            normal(self.paper.head_std),
            num_skipped=self.asks.num_front,
            hands_on=TRANSFORMED if self.has_transform else None,
        )

    @property
    def part_names(self) -> Mapping[Role, str]:
        """Names of adapter, labels, latents, positions and encoder."""
        return {
            "transform": "adapter", "start": "labels", "content": "linear",
            "positions": "positions", "memory": "encoder",
        }  # fmt: skip

    @property
    def deviations(self) -> Mapping[Role, float]:
        """1 / √h for positions."""
        return dict.fromkeys(("positions", "front"), self.config.model.hidden_size**-0.5)

    def part(self, role: Role) -> nn.Module | nn.Parameter:
        """Build a part; the embedding of latents has Flax's default initialization."""
        size, paper = self.reads.width, self.paper
        if role == "transform":
            bottleneck = paper.adapter_bottleneck or 4 * size
            return Adapter(size, num_blocks=paper.adapter_blocks, bottleneck=bottleneck)
        if role == "content":
            return self.reads.embedding(self.core, truncated_normal(size**-0.5))
        return super().part(role)

    def initialization(self) -> Initialization:
        """Return the released code's: LeCun for attention, Xavier for the MLP."""
        lecun = truncated_normal(self.config.model.hidden_size**-0.5)
        return Initialization(lecun, lecun, lecun, xavier_uniform, xavier_uniform)

    @property
    def likelihood(self) -> Likelihood | None:
        """A token's log-likelihood sums over its d channels; the adapter preserves volumes."""
        size, given = self.reads.width, None
        if self.paper.num_classes:
            given = f"the class, but for the {self.paper.label_dropout:.0%} that training drops"
        words = "number of the VAE's latents"
        return Likelihood(words, self.num_tokens * size, per_loss=size, given=given)
