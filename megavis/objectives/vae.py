"""Training of the β-VAE whose latents GIVT models.

"GIVT: Generative Infinite-Vocabulary Transformers", section 3.1 and appendix C.2: squared error,
perceptual and adversarial loss after MaskGIT, and β times the divergence from N(0, 1).

Two networks learn at once. The usual two optimizers that take turns would not fit an engine with
one backward pass a step, so both take their step at the same time: the loss is the sum of the
autoencoder's and the discriminator's. The first sees the discriminator's weights as constants,
the second the reconstruction, so each gradient is that of one side alone; the two sides are groups
of one optimizer, with learning rates and decay rates of their own.

Legend: b images, H and W pixels, h and w latents, d channels of a latent.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cached_property
from typing import Annotated, Any, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from megavis.config.schema import Complaint, Fraction, ObjectiveConfig, Positive, RunConfig
from megavis.data.batch import Batch
from megavis.data.manifest import Manifest
from megavis.model.discriminator import (
    Discriminator,
    discriminator_loss,
    frozen,
    generator_loss,
    squared_slope,
)
from megavis.model.perceptual import PerceptualDistance
from megavis.model.stack import LayerPlan
from megavis.objectives.trainable import GroupOptions, Sequence, Trainable
from megavis.parallel.random import normal
from megavis.tokenizers.vae_network import Posterior, VAENetwork, VAEShape

Weight = Annotated[float, Field(ge=0)]


class VAEConfig(ObjectiveConfig):
    """The keys of the VAE: sizes (table 6) and the weights of its losses."""

    has_blocks: ClassVar[bool] = False

    name: Literal["vae"] = "vae"
    latent_channels: Positive = 16
    """d, real numbers a latent."""
    filters: Positive = 128
    """Channels of the first level; a multiple of `norm_groups`."""
    multipliers: Annotated[tuple[Positive, ...], Field(strict=False, min_length=1)] = (
        1,
        1,
        2,
        2,
        4,
    )
    """Channels of each level as multiples of `filters`; images are halved between levels."""
    blocks_per_level: Positive = 2
    """Residual blocks a level, and in the middle."""
    norm_groups: Positive = 32
    """Groups of each group norm; 32 in the paper. Narrow networks want fewer: a group of one
    channel forgets how bright it was."""
    reconstruction_weight: Weight = 1.0
    """Of the squared error, averaged over pixels and channels in [0, 1]."""
    beta: Weight = 5e-5
    """β, of the divergence from N(0, 1); 1e-5 for the Large models (table 5)."""
    kl_normalization: Literal["sum", "mean"] = "sum"
    """`sum`: nats an image, over all its latents (section 3.1 flattens them); `mean`: nats a
    number. Neither paper nor code publishes what the image VAE used."""
    perceptual_weight: Weight = 0.1
    """Of the distance in VGG-16's features; 0 switches it off."""
    perceptual_weights: str | None = None
    """File of VGG-16 weights (.safetensors or .pth, torchvision's names)."""
    adversarial_weight: Weight = 0.1
    """Of the non-saturating adversarial loss; 0 trains without a discriminator."""
    r1_weight: Weight = 10.0
    """γ of the penalty γ/2 · ‖∇D(x)‖² on the discriminator's slope at images."""
    discriminator_filters: Positive = 64
    """Channels of the discriminator's first level."""
    discriminator_learning_rate: Annotated[float, Field(gt=0)] | None = None
    """Peak rate of the discriminator; optimizer.learning_rate when absent."""
    discriminator_betas: Annotated[tuple[Fraction, Fraction], Field(strict=False)] | None = None
    """Adam's decay rates for the discriminator; optimizer.betas when absent."""

    @property
    def shape(self) -> VAEShape:
        """The sizes of the network."""
        return VAEShape(
            self.latent_channels,
            self.filters,
            self.multipliers,
            self.blocks_per_level,
            self.norm_groups,
        )

    def check(self, config: RunConfig) -> Iterator[Complaint]:
        """Want sizes that divide, a file where one is needed, and a plain layout."""
        if self.filters % self.norm_groups:
            text = f"{self.filters} is no multiple of objective.norm_groups {self.norm_groups}"
            yield "objective.filters", text
        if config.data.image_size % self.shape.downsampling:
            text = f"{config.data.image_size} does not divide by {self.shape.downsampling}, the"
            yield "data.image_size", f"{text} pixels on the side of a latent"
        if self.perceptual_weight and self.perceptual_weights is None:
            text = "names a file of VGG-16 weights and must be given; or set perceptual_weight: 0"
            yield "objective.perceptual_weights", text
        yield from self._check_layout(config)

    def _check_layout(self, config: RunConfig) -> Iterator[Complaint]:
        parallel = config.parallel
        for key in ("tensor_model_parallel_size", "pipeline_model_parallel_size"):
            if getattr(parallel, key) > 1:
                text = "a VAE is trained data-parallel; the only legal choice is 1"
                yield f"parallel.{key}", text
        if parallel.zero_stage == 3:
            text = "3 splits weights that the penalty differentiates twice; use 2"
            yield "parallel.zero_stage", text
        if parallel.activation_checkpointing != "none":
            yield "parallel.activation_checkpointing", "is for Transformer blocks; use none"


State = tuple[Tensor, ...]


class AutoencoderLayer(nn.Module):
    """The VAE as the first layer: pixels and noise to pixels, reconstruction and posterior."""

    def __init__(self, shape: VAEShape) -> None:
        super().__init__()
        self.network = VAENetwork(shape)

    def forward(self, inputs: State) -> State:
        """Map pixels `[b, 3, H, W]` in [0, 1] and noise `[b, d, h, w]`.

        Returns:
            Pixels, reconstruction, mean and log-variance.
        """
        pixels, noise = inputs
        pixels = pixels.to(self.network.encoder.conv_in.weight.dtype)
        reconstruction, posterior = self.network(pixels, noise)
        return pixels, reconstruction, posterior.mean, posterior.log_variance


class DiscriminatorLayer(nn.Module):
    """The discriminator as the second layer: adds its scores."""

    def __init__(self, image_size: int, filters: int, *, penalises: bool) -> None:
        super().__init__()
        self.network, self.penalises = Discriminator(image_size, filters), penalises

    def forward(self, state: State) -> State:
        """Add to what `AutoencoderLayer` gives, each `[b]`.

        Returns:
            Also: scores of the reconstruction for the autoencoder, scores of images and of the
            reconstruction for the discriminator, and the squared slope at images.
        """
        pixels, reconstruction, *_ = state
        for_generator = frozen(self.network, reconstruction)
        real, fake = self.network(pixels), self.network(reconstruction.detach())
        slope = torch.zeros(len(pixels), device=pixels.device)
        # Without gradients, as in validation, there is no slope to measure.
        if self.penalises and torch.is_grad_enabled():
            slope = squared_slope(self.network, pixels)
        return (*state, for_generator, real, fake, slope)


class VAEObjective(Trainable):
    """Reconstruct images through latents that are close to N(0, 1)."""

    config_type = VAEConfig

    @property
    def paper(self) -> VAEConfig:
        """The section of the config."""
        assert isinstance(self.config.objective, VAEConfig)
        return self.config.objective

    @property
    def num_tokens(self) -> int:
        """Latents of an image."""
        return (self.config.data.image_size // self.paper.shape.downsampling) ** 2

    def check_data(self, manifest: Manifest) -> Iterator[str]:
        """Want images."""
        if manifest.kind != "jpeg":
            yield f"holds {manifest.kind} shards; a vae wants jpeg shards"

    def layer_plans(self) -> list[LayerPlan]:
        """Return autoencoder and discriminator."""
        paper, size, seed = self.paper, self.config.data.image_size, self.config.seed
        plans = [
            LayerPlan("vae", AutoencoderLayer, lambda: AutoencoderLayer(paper.shape), seed),
        ]
        if paper.adversarial_weight:
            filters, penalises = paper.discriminator_filters, paper.r1_weight > 0
            plans.append(
                LayerPlan(
                    "discriminator",
                    DiscriminatorLayer,
                    lambda: DiscriminatorLayer(size, filters, penalises=penalises),
                    seed,
                )
            )
        return plans

    def group_options(self, name: str) -> GroupOptions:
        """Give the discriminator its own rates."""
        if not name.startswith("discriminator."):
            return GroupOptions()
        rate = self.paper.discriminator_learning_rate
        scale = 1.0 if rate is None else rate / self.config.optimizer.learning_rate
        return GroupOptions(scale, self.paper.discriminator_betas)

    def sequence(self, batch: Batch) -> Sequence:
        """Return pixels and the noise of the posterior's sample; there are no other targets."""
        return Sequence(self.inputs_from(batch.inputs, sample_index=batch.sample_index), ())

    def inputs_from(
        self, inputs: Any, *, sample_index: Tensor | None = None, **_: Any
    ) -> tuple[Tensor, ...]:
        """Return pixels and noise.

        Args:
            inputs: images `[b, H, W, 3]`, uint8, or floats in [0, 1].
            sample_index: int64 `[b]`, decides the noise; without it the noise is zero, so that
                the mean is decoded.
        """
        scale = 1.0 if inputs.is_floating_point() else 255.0
        pixels = inputs.permute(0, 3, 1, 2).float() / scale
        side = pixels.shape[-1] // self.paper.shape.downsampling
        shape = (self.paper.latent_channels, side, side)
        if sample_index is None:
            return pixels, pixels.new_zeros(len(pixels), *shape)
        count = shape[0] * side * side
        noise = normal(sample_index, count, seed=self.config.seed, purpose="posterior")
        return pixels, noise.unflatten(1, shape)

    def loss(self, predictions: State, targets: tuple[Tensor, ...]) -> Tensor:
        """Return the sum of the autoencoder's loss and the discriminator's."""
        terms, paper = self.measures(predictions, targets), self.paper
        total = (
            paper.reconstruction_weight * terms["squared_error"]
            + paper.beta * terms["kl"]
            + paper.perceptual_weight * terms.get("perceptual", 0.0)
            + paper.adversarial_weight * terms.get("adversarial", 0.0)
        )
        slope = 0.5 * paper.r1_weight * terms.get("squared_slope", 0.0)
        return total + terms.get("discriminator", 0.0) + slope

    def measures(self, predictions: State, targets: tuple[Tensor, ...]) -> Mapping[str, Tensor]:
        """Return the terms of the loss before their weights, means over the images."""
        pixels, reconstruction, mean, log_variance, *scores = predictions
        kl = Posterior(mean, log_variance).kl()
        terms = {
            "squared_error": (reconstruction.float() - pixels.float()).square().mean(),
            "kl": kl.flatten(1).sum(1).mean() if self._sums_kl else kl.mean(),
        }
        if self.paper.perceptual_weight:
            terms["perceptual"] = self._perceptual(reconstruction, pixels).mean()
        if scores:
            for_generator, real, fake, slope = scores
            terms["adversarial"] = generator_loss(for_generator).mean()
            terms["discriminator"] = discriminator_loss(real, fake).mean()
            terms["squared_slope"] = slope.mean()
        return terms

    @property
    def _sums_kl(self) -> bool:
        return self.paper.kl_normalization == "sum"

    @cached_property
    def _perceptual(self) -> PerceptualDistance:
        assert self.paper.perceptual_weights is not None
        return PerceptualDistance.load(self.paper.perceptual_weights)

    def outputs(self, predictions: State) -> Tensor:
        """Return the moments of the posterior, means then log-variances: `[b, 2 · d, h, w]`."""
        return torch.cat(predictions[2:4], dim=1)

    def reconstruction(self, predictions: State) -> Tensor:
        """Return the images that came out, uint8 `[b, H, W, 3]`."""
        pixels = (predictions[1].float().clamp(0.0, 1.0) * 255.0).round()
        return pixels.to(torch.uint8).permute(0, 2, 3, 1)

    def flops_per_image(self) -> float:
        """Return the operations of a training step for one image: three forward passes.

        The discriminator is not counted.
        """
        size = self.config.data.image_size
        with torch.device("meta"), torch.no_grad():
            network = VAENetwork(self.paper.shape)
            with FlopCounterMode(display=False) as counter:
                network.decoder(network.posterior(torch.empty(1, 3, size, size)).mean)
        return 3.0 * counter.get_total_flops()
