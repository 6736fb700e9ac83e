"""GIVT's encoder-decoder: latents predicted from an image ("GIVT", section 4.2, appendix B).

The paper's model for dense prediction, after UViM: GIVT-Causal with a cross-attention after each
self-attention, to a Vision Transformer's encoding of an image (`composition/encoded_image.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property

from megavis.composition.encoded_image import EncodedImage, PretrainedEncoder
from megavis.composition.reader import Role
from megavis.composition.trainable import Likelihood
from megavis.model.encoder import EncoderSizes
from megavis.papers.givt.config import EncoderDecoderConfig
from megavis.papers.givt.paper import GIVT


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
        return super().deviations if std is None else {"positions": std}

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
