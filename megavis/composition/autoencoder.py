"""Training of autoencoders, shared by the VAE and the VQGAN.

Squared error, perceptual and adversarial loss, as for MaskGIT's tokenizer ("MaskGIT: Masked
Generative Image Transformer", appendix A), plus the terms of each autoencoder's bottleneck.

Autoencoder and discriminator usually alternate between two optimizers. The engine has one backward
pass per step, so both are updated together, with the sum of their losses. The autoencoder's loss
treats the discriminator's weights as constants, and the discriminator's loss the reconstruction, so
the gradients do not mix; the two networks are parameter groups of one optimizer, with their own
learning rates and betas.

Legend: b images, H and W pixels.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Iterator, Mapping
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from megavis.composition.trainable import Backbone, SequenceBatch, SumAndCount
from megavis.config.autoencoder import AutoencoderConfig
from megavis.data.format.manifest import Manifest
from megavis.data.loading.loader import Batch
from megavis.model.autoencoder_losses import (
    Discriminator,
    PerceptualDistance,
    discriminator_loss,
    frozen,
    generator_loss,
    squared_slope,
)
from megavis.model.parameters import ParamGroupOptions
from megavis.model.stack import LayerPlan
from megavis.parallel.random import normal
from megavis.tokenizers.network_tokenizer import to_images

State = tuple[Tensor, ...]
NUM_SCORES = 4
"""Number of tensors that the discriminator's layer adds to the state."""


class AutoencoderObjective(Backbone):
    """Reconstruct images from a much smaller grid of latents."""

    paper: AutoencoderConfig
    reconstructs = True

    @abstractmethod
    def build_autoencoder(self) -> nn.Module:
        """Build the first layer, from `SequenceBatch.inputs` to pixels, reconstruction and extras.

        Pixels and reconstruction are `[b, 3, H, W]`, nominally in [0, 1].
        """

    @abstractmethod
    def own_terms(self, between: State) -> Mapping[str, Tensor]:
        """Return the loss terms of the first layer's extras, unweighted."""

    @abstractmethod
    def own_loss(self, terms: Mapping[str, Tensor]) -> Tensor:
        """Return the weighted sum of `own_terms`."""

    @abstractmethod
    def plain_network(self, pixels: Tensor) -> Tensor:
        """Build the autoencoder and run it on pixels `[b, 3, H, W]`, to count its FLOPs."""

    @property
    def num_tokens(self) -> int:
        """Cells of the latent grid."""
        return (self.config.data.image_size // self.paper.downsampling) ** 2

    def check_data(self, manifest: Manifest) -> Iterator[str]:
        """Check that the shards hold images."""
        if manifest.kind != "jpeg":
            yield f"holds {manifest.kind} shards; a {self.paper.name} needs jpeg shards"

    def layer_plans(self) -> list[LayerPlan]:
        """Return autoencoder and discriminator."""
        paper, size, seed = self.paper, self.config.data.image_size, self.config.seed
        plans = [LayerPlan(paper.name, self.build_autoencoder, seed)]
        if paper.adversarial_weight:
            build = partial(
                DiscriminatorLayer,
                size,
                paper.discriminator_filters,
                penalises=paper.r1_weight > 0,
            )
            rate = paper.discriminator_learning_rate
            # Parameter groups can only scale the one scheduled rate.
            scale = 1.0 if rate is None else rate / self.config.optimizer.learning_rate
            options = ParamGroupOptions(scale, paper.discriminator_betas)
            plans.append(LayerPlan("discriminator", build, seed, options=options))
        return plans

    def sequence(self, batch: Batch) -> SequenceBatch:
        """Return the inputs; the images themselves are the target."""
        return SequenceBatch(self.inputs_from(batch.inputs, sample_index=batch.sample_index), ())

    def pixels_from(self, inputs: Any) -> Tensor:
        """Return pixels `[b, 3, H, W]` of images `[b, H, W, 3]`, uint8 or floats in [0, 1]."""
        scale = 1.0 if inputs.is_floating_point() else 255.0
        return inputs.permute(0, 3, 1, 2).float() / scale

    def loss(self, predictions: State, targets: tuple[Tensor, ...]) -> Tensor:
        """Return the sum of the autoencoder's loss and the discriminator's."""
        terms, paper = self.terms(predictions), self.paper
        total = (
            paper.reconstruction_weight * terms["squared_error"]
            + self.own_loss(terms)
            + paper.perceptual_weight * terms.get("perceptual", 0.0)
            + paper.adversarial_weight * terms.get("adversarial", 0.0)
        )
        slope = 0.5 * paper.r1_weight * terms.get("squared_slope", 0.0)
        return total + terms.get("discriminator", 0.0) + slope

    def measures(
        self, predictions: State, targets: tuple[Tensor, ...]
    ) -> Mapping[str, SumAndCount]:
        """Return the unweighted terms of the loss as sums over images."""
        count = len(predictions[0])
        return {name: (term * count, count) for name, term in self.terms(predictions).items()}

    def terms(self, predictions: State) -> Mapping[str, Tensor]:
        """Return the unweighted terms of the loss, averaged over the images."""
        judged = self.paper.adversarial_weight > 0
        scores = predictions[-NUM_SCORES:] if judged else ()
        pixels, reconstruction, *between = predictions[: len(predictions) - len(scores)]
        terms = {
            "squared_error": (reconstruction.float() - pixels.float()).square().mean(),
            **self.own_terms(tuple(between)),
        }
        if self.paper.perceptual_weight:
            # A pipeline stage receives the pixels as a tensor that requires a gradient.
            terms["perceptual"] = self._perceptual(reconstruction, pixels.detach()).mean()
        if judged:
            for_generator, real, fake, slope = scores
            terms["adversarial"] = generator_loss(for_generator).mean()
            terms["discriminator"] = discriminator_loss(real, fake).mean()
            if self.paper.r1_weight:
                terms["squared_slope"] = slope.mean()
        return terms

    @cached_property
    def _perceptual(self) -> PerceptualDistance:
        assert self.paper.perceptual_weights is not None
        return PerceptualDistance.load(self.paper.perceptual_weights)

    def reconstruction(self, predictions: State) -> Tensor:
        """Return the reconstructed images, uint8 `[b, H, W, 3]`."""
        return to_images(predictions[1].float())

    def flops_per_image(self) -> float:
        """Return the FLOPs of a training step for one image, three times a forward pass's.

        Discriminator and perceptual network are not counted.
        """
        size = self.config.data.image_size
        counter = FlopCounterMode(display=False)
        # On the meta device, so that counting does not allocate a second network.
        with torch.device("meta"), torch.no_grad(), counter:
            self.plain_network(torch.empty(1, 3, size, size))
        return 3.0 * counter.get_total_flops()

    @property
    def counts_whole_step(self) -> bool:
        """True without discriminator and perceptual network, which may cost more than the rest."""
        return not (self.paper.adversarial_weight or self.paper.perceptual_weight)


def posterior_noise(
    inputs: Tensor, shape: tuple[int, ...], sample_index: Tensor | None, seed: int
) -> Tensor:
    """Draw the noise of a Gaussian bottleneck, float32 `[b, *shape]`, on the device of `inputs`.

    It is a function of seed and sample, int64 `[b]`; without samples it is zero, which decodes the
    posterior's mean.
    """
    if sample_index is None:
        return torch.zeros(len(inputs), *shape, device=inputs.device)
    index = sample_index.to(inputs.device)
    draws = normal(index, math.prod(shape), seed=seed, purpose="posterior")
    return draws.unflatten(1, shape)


class DiscriminatorLayer(nn.Module):
    """The discriminator as the second layer, which adds its scores to the state."""

    def __init__(self, image_size: int, filters: int, *, penalises: bool) -> None:
        super().__init__()
        self.network, self.penalises = Discriminator(image_size, filters), penalises

    def forward(self, state: State) -> State:
        """Score images and their reconstructions.

        Args:
            state: output of the autoencoder's layer, which begins with pixels and reconstruction.

        Returns:
            The state and four tensors `[b]`: scores of the reconstruction for the autoencoder's
            loss, scores of images and of reconstructions for the discriminator's, and the squared
            gradient norm at images (zeros without R1).
        """
        pixels, reconstruction, *_ = state
        for_generator = frozen(self.network, reconstruction)
        real, fake = self.network(pixels), self.network(reconstruction.detach())
        slope = torch.zeros(len(pixels), device=pixels.device)
        if self.penalises:
            slope = squared_slope(self.network, pixels)
        return (*state, for_generator, real, fake, slope)
