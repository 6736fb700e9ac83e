"""MAR: Autoregressive Image Generation without Vector Quantization (Li et al., 2024).

An encoder sees some of a VAE's latents, the first of an order drawn for each image, after rows that
hold the class. A decoder adds mask tokens for the others (section 4.2), and an MLP denoises each of
these, given the decoder's output ("Diffusion Loss", sections 3.2 and 4.1). Images are generated in
rounds along the order.

Details not in the paper follow the released code: learned positions of tokens and class rows in the
encoder, in the decoder and before the MLP, and a norm of the encoder's input; a normal distribution
of the masking ratio; four noisy copies of each token; a learned variance, trained by the
variational bound. The code draws one ratio for all images on a GPU; here each image has its own
ratio and the same weight in the loss. It divides by a γ of 2e-9; see `least_signal`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from megavis.config.schema import Fraction, Positive, RunConfig
from megavis.config.section import Above0, AtLeast0
from megavis.grammar.grammar import Grammar
from megavis.grammar.paper import PaperConfig, Renamed
from megavis.grammar.words import (
    DecoderConfig,
    Diffusion,
    Labels,
    Latents,
    Rounds,
    Visible,
)


class MARConfig(PaperConfig):
    """Config keys of MAR."""

    sampling_keys: ClassVar[frozenset[str]] = frozenset(
        {"sampling_steps", "sampling_temperature", "least_signal"}
    )

    names: ClassVar[Mapping[str, str | Renamed]] = {
        "reads.patch_size": "downsampling",
        "reads.channels": "latent_channels",
        "reads.scale": "latent_scale",
        "schedule.kind": Renamed("downsampling", "set it to half of data.image_size or less"),
        "schedule.least_masking": "least_masking",
        "condition.dropout": "label_dropout",
        "condition.count": "class_rows",
        "density.decoder_layers": "denoiser_layers",
        "density.decoder_width": "denoiser_width",
    }

    name: Literal["mar"] = "mar"
    latent_channels: Positive = 16
    """Channels of a latent."""
    downsampling: Positive = 16
    """Pixels per latent along each side."""
    latent_scale: Above0 = 1.0
    """Factor applied to latents, so that their standard deviation is near 1: 0.2325 for the paper's
    KL-16 in the released code."""
    tokenizer: str | None = None
    """Run folder of the VAE, which encodes images and decodes samples; training on latents shards
    needs none."""
    num_classes: Positive = 1000
    """Number of classes."""
    label_dropout: Fraction = 0.1
    """Probability of the dummy class in training (appendix B); 0 disables guidance and features."""
    class_rows: Positive = 64
    """Rows that hold the class, before the latents (section 4.2)."""
    least_masking: Fraction = 0.7
    """Smallest masking ratio (section 4.2)."""
    masking_deviation: Above0 = 0.25
    """Standard deviation of the masking ratio: a normal around 1, cut to [least_masking, 1]."""
    decoder: DecoderConfig = DecoderConfig(num_layers=16, hidden_size=1024, num_attention_heads=16)
    """The decoder; in the paper, encoder and decoder each have half of the blocks (section 4.2)."""
    denoiser_layers: Positive = 3
    """Residual blocks of the MLP (section 4.1)."""
    denoiser_width: Positive = 1024
    """Width of the MLP (section 4.1)."""
    noises_per_token: Positive = 4
    """Noisy copies of each latent in training; 4 in the released code."""
    sampling_steps: Positive = 100
    """Denoising steps in generation, out of 1,000 in training (section 4.1)."""
    sampling_temperature: AtLeast0 = 1.0
    """τ, which scales the noise of each denoising step (section 3.2)."""
    least_signal: Annotated[float, Field(gt=0, lt=1)] = 1e-4
    """Smallest γ, the signal's share of the power, that generation divides by. 1e-12 is the process
    of the released code, whose first step of 100 multiplies errors of the predicted noise by 316:
    its images are black until the network has converged."""

    def grammar(self, run: RunConfig) -> Grammar:
        """Return the model of section 4."""
        return Grammar(
            reads=Latents(
                channels=self.latent_channels,
                patch_size=self.downsampling,
                scale=self.latent_scale,
                tokenizer=self.tokenizer,
            ),
            schedule=Rounds(
                chosen="order",
                least_masking=self.least_masking,
                masking_deviation=self.masking_deviation,
                loss_average="images",
            ),
            asks=Visible(decoder=self.decoder, norm=True),
            density=Diffusion(
                decoder="modulated_mlp",
                decoder_layers=self.denoiser_layers,
                decoder_width=self.denoiser_width,
                decoder_positions="learned",
                noise="cosine",
                noises_per_token=self.noises_per_token,
                predicts="noise",
                learns_variance=True,
                sampling_steps=self.sampling_steps,
                sampling_temperature=self.sampling_temperature,
                least_signal=self.least_signal,
            ),
            condition=Labels(
                num_classes=self.num_classes, count=self.class_rows, dropout=self.label_dropout
            ),
            positions=run.model.positions or "learned",
        )
