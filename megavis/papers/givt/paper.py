"""GIVT: Generative Infinite-Vocabulary Transformers (Tschannen et al., 2024), in three forms.

GIVT-Causal: an image is the raster sequence of a VAE's real-valued latents. Each token is predicted
from those before it as a mixture of Gaussians instead of logits over a vocabulary (section 3.2); a
class embedding comes first.

GIVT-MaskGIT: masked latents are predicted from the others (section 3.2), after "MaskGIT" (Chang et
al., 2022): the mask ratio cos(π/2 · u) is drawn for each image.

The encoder-decoder, the paper's model for dense prediction, after UViM: latents are predicted from
an image (section 4.2, appendix B). It is GIVT-Causal with a cross-attention after each
self-attention, to a Vision Transformer's encoding of the image (`composition/encoded_image.py`).

Legend: b images, n tokens, d channels of a token, h hidden size.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property
from typing import ClassVar

import torch
from torch import nn

from megavis.composition.asking import Asking, Mask, Shift
from megavis.composition.composition import Composition
from megavis.composition.condition import ClassInFront, Condition, Labels
from megavis.composition.encoded_image import EncodedImage, PretrainedEncoder
from megavis.composition.encoded_tokens import Latents
from megavis.composition.parts import TRANSFORMED, Role
from megavis.composition.trainable import Likelihood
from megavis.densities.gaussians import CorrelatedGaussian, GaussianMixture, Gaussians
from megavis.model.adapter import Adapter
from megavis.model.embeddings import TokenHead
from megavis.model.encoder import EncoderSizes
from megavis.model.gaussian_mixture import ScaleForm
from megavis.model.parameters import Initialization, normal, truncated_normal, xavier_uniform
from megavis.papers.givt.config import (
    EncoderDecoderConfig,
    GIVTConfig,
    LatentTokensConfig,
    MaskGITConfig,
)
from megavis.schedules.masked import Rounds
from megavis.schedules.one_by_one import OneByOne
from megavis.schedules.orders import Orders
from megavis.schedules.schedule import Schedule


class GIVT(Composition):
    """Next-token prediction of latents."""

    config_type: ClassVar[type[LatentTokensConfig]] = GIVTConfig
    paper: LatentTokensConfig
    default_positions = "learned"
    transform_key = "objective.adapter_blocks"
    default_share = 0.0
    labels_type: ClassVar[type[Labels]] = Labels

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
        """The class, if there are classes; a learned token comes first otherwise."""
        return self._labels()

    def _labels(self) -> Condition:
        paper, seed = self.paper, self.config.seed
        if not paper.num_classes:
            return Condition()
        return self.labels_type(paper.num_classes, dropout=paper.label_dropout, seed=seed)

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
            also_return=TRANSFORMED if self.has_transform else None,
        )

    @property
    def deviations(self) -> Mapping[Role, float]:
        """1 / √h for positions, 1 for tokens."""
        tokens: tuple[Role, ...] = ("start", "front", "mask", "marks")
        positions: tuple[Role, ...] = ("positions", "front_position")
        width = self.config.model.hidden_size**-0.5
        return {**dict.fromkeys(tokens, 1.0), **dict.fromkeys(positions, width)}

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


class GIVTMaskGIT(GIVT):
    """Predict masked latents."""

    config_type = MaskGITConfig
    paper: MaskGITConfig
    labels_type = ClassInFront

    @cached_property
    def schedule(self) -> Rounds:
        """Mask a drawn share of the tokens; generate in rounds."""
        return Rounds(
            self.orders,
            least_masking=self.paper.least_masking,
            loss_average=self.paper.loss_average,
            seed=self.config.seed,
        )

    @cached_property
    def asks(self) -> Mask:
        """One row per token, masked or not, after the label, as in the released code."""
        return Mask(
            num_front=1,
            filler="vector" if self.paper.masked_input == "vector" else "zero_token",
            marks=True,
            places_front=self.position_kind in ("learned", "learned_sincos"),
        )

    @property
    def likelihood(self) -> None:
        """None: masked tokens are predicted independently."""
        return None


class GIVTEncoderDecoder(GIVT):
    """Next-token prediction of latents, given an image."""

    config_type = EncoderDecoderConfig
    paper: EncoderDecoderConfig

    @cached_property
    def condition(self) -> EncodedImage:
        """The encoded image, after the class."""
        return EncodedImage(
            self.config.data.image_size,
            EncoderSizes(
                self.paper.encoder_layers,
                self.paper.encoder_patch_size,
                self.paper.encoder_hidden_size,
                self.paper.encoder_num_attention_heads,
                self.paper.encoder_learning_rate_scale,
                self.paper.encoder_activation,
                self.paper.encoder_norm_epsilon,
                self.paper.position_std,
            ),
            others=self._labels(),
        )

    @property
    def deviations(self) -> Mapping[Role, float]:
        """`objective.position_std`, and otherwise GIVT's."""
        std = self.paper.position_std
        return {**super().deviations, **({} if std is None else {"positions": std})}

    def pretrained(self) -> PretrainedEncoder | None:
        """Open the Vision Transformer that the encoder starts from."""
        run = self.paper.encoder_from_run
        return None if run is None else self.condition.pretrained(run, self.config.model)

    @property
    def likelihood(self) -> Likelihood:
        """Likelihood of the causal model, given the image."""
        own = super().likelihood
        assert own is not None
        return replace(own, given="the image" + (f" and {own.given}" if own.given else ""))
