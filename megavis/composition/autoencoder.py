"""Training of autoencoders: shared by the VAE and the VQGAN.

Squared error, perceptual and adversarial loss, as in MaskGIT's tokenizer ("MaskGIT: Masked
Generative Image Transformer", appendix A), plus the terms of what lies between encoder and
decoder, which each tokenizer brings.

Two networks learn at once. The usual two optimizers that take turns would not fit an engine with
one backward pass a step, so both take their step at the same time: the loss is the sum of the
autoencoder's and the discriminator's. The first sees the discriminator's weights as constants,
the second the reconstruction, so each gradient is that of one side alone; the two sides are groups
of one optimizer, with learning rates and decay rates of their own.

Legend: b images, H and W pixels.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from megavis.composition.autoencoder_config import AutoencoderConfig
from megavis.composition.tokens import blank_batch
from megavis.composition.trainable import Backbone, SequenceBatch, Trainable
from megavis.data.format.manifest import Manifest
from megavis.data.loading.batch import Batch
from megavis.model.autoencoder_losses import (
    Discriminator,
    PerceptualDistance,
    discriminator_loss,
    frozen,
    generator_loss,
    squared_slope,
)
from megavis.model.declarations import ParamGroupOptions
from megavis.model.stack import LayerPlan
from megavis.tokenizers.network_tokenizer import to_images

State = tuple[Tensor, ...]
NUM_SCORES = 4
"""Tensors that the discriminator's layer adds to the state."""


class DiscriminatorLayer(nn.Module):
    """The discriminator as the second layer: adds its scores."""

    def __init__(self, image_size: int, filters: int, *, penalises: bool) -> None:
        super().__init__()
        self.network, self.penalises = Discriminator(image_size, filters), penalises

    def forward(self, state: State) -> State:
        """Score images and their reconstruction.

        Args:
            state: what the autoencoder's layer gives, pixels and reconstruction first.

        Returns:
            The state and four tensors `[b]`: scores of the reconstruction for the autoencoder,
            scores of images and of the reconstruction for the discriminator, and the squared slope
            at images.
        """
        pixels, reconstruction, *_ = state
        for_generator = frozen(self.network, reconstruction)
        real, fake = self.network(pixels), self.network(reconstruction.detach())
        slope = torch.zeros(len(pixels), device=pixels.device)
        if self.penalises:
            slope = squared_slope(self.network, pixels)
        return (*state, for_generator, real, fake, slope)


class AutoencoderObjective(Trainable, Backbone):
    """Reconstruct images through a grid that is much smaller."""

    @property
    def backbone(self) -> AutoencoderObjective:
        """This itself."""
        return self

    @property
    def paper(self) -> AutoencoderConfig:
        """The section of the config."""
        assert isinstance(self.config.objective, AutoencoderConfig)
        return self.config.objective

    @abstractmethod
    def build_autoencoder(self) -> nn.Module:
        """Return the first layer: `SequenceBatch.inputs` to pixels, reconstruction and extras.

        Pixels and reconstruction are `[b, 3, H, W]` in about [0, 1].
        """

    @abstractmethod
    def own_terms(self, between: State) -> Mapping[str, Tensor]:
        """Return the terms of what the first layer adds, before their weights."""

    @abstractmethod
    def own_loss(self, terms: Mapping[str, Tensor]) -> Tensor:
        """Return the weighted sum of `own_terms`."""

    @abstractmethod
    def plain_network(self, pixels: Tensor) -> Tensor:
        """Build the autoencoder and run it on pixels `[b, 3, H, W]`, to count operations."""

    @property
    def num_tokens(self) -> int:
        """Places of the grid between encoder and decoder."""
        return (self.config.data.image_size // self.paper.downsampling) ** 2

    def blank_batch(self, num_images: int, device: torch.device) -> Batch:
        """Return black images."""
        side = self.config.data.image_size
        return blank_batch(num_images, (side, side, 3), torch.uint8, device)

    def check_data(self, manifest: Manifest) -> Iterator[str]:
        """Check that the shards hold images."""
        if manifest.kind != "jpeg":
            yield f"holds {manifest.kind} shards; a {self.paper.name} needs jpeg shards"

    def layer_plans(self) -> list[LayerPlan]:
        """Return autoencoder and discriminator."""
        paper, size, seed = self.paper, self.config.data.image_size, self.config.seed
        plans = [LayerPlan(paper.name, self.build_autoencoder, seed)]
        if paper.adversarial_weight:
            filters, penalises = paper.discriminator_filters, paper.r1_weight > 0
            plans.append(
                LayerPlan(
                    "discriminator",
                    lambda: DiscriminatorLayer(size, filters, penalises=penalises),
                    seed,
                    options=self._discriminator_options(),
                )
            )
        return plans

    def _discriminator_options(self) -> ParamGroupOptions:
        """Return the discriminator's own rates."""
        rate = self.paper.discriminator_learning_rate
        scale = 1.0 if rate is None else rate / self.config.optimizer.learning_rate
        return ParamGroupOptions(scale, self.paper.discriminator_betas)

    def sequence(self, batch: Batch) -> SequenceBatch:
        """Return what goes in; there are no other targets."""
        return SequenceBatch(self.inputs_from(batch.inputs, sample_index=batch.sample_index), ())

    def pixels_from(self, inputs: Any) -> Tensor:
        """Return pixels `[b, 3, H, W]` of images `[b, H, W, 3]`, uint8 or floats in [0, 1]."""
        scale = 1.0 if inputs.is_floating_point() else 255.0
        return inputs.permute(0, 3, 1, 2).float() / scale

    def loss(self, predictions: State, targets: tuple[Tensor, ...]) -> Tensor:
        """Return the sum of the autoencoder's loss and the discriminator's."""
        terms, paper = self.measures(predictions, targets), self.paper
        total = (
            paper.reconstruction_weight * terms["squared_error"]
            + self.own_loss(terms)
            + paper.perceptual_weight * terms.get("perceptual", 0.0)
            + paper.adversarial_weight * terms.get("adversarial", 0.0)
        )
        slope = 0.5 * paper.r1_weight * terms.get("squared_slope", 0.0)
        return total + terms.get("discriminator", 0.0) + slope

    def measures(self, predictions: State, targets: tuple[Tensor, ...]) -> Mapping[str, Tensor]:
        """Return the terms of the loss before their weights, means over the images."""
        judged = self.paper.adversarial_weight > 0
        scores = predictions[-NUM_SCORES:] if judged else ()
        pixels, reconstruction, *between = predictions[: len(predictions) - len(scores)]
        terms = {
            "squared_error": (reconstruction.float() - pixels.float()).square().mean(),
            **self.own_terms(tuple(between)),
        }
        if self.paper.perceptual_weight:
            terms["perceptual"] = self._perceptual(reconstruction, pixels).mean()
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

    @property
    def reconstructs(self) -> bool:
        """True: images go in and come out."""
        return True

    def reconstruction(self, predictions: State) -> Tensor:
        """Return the images that came out, uint8 `[b, H, W, 3]`."""
        return to_images(predictions[1].float())

    def flops_per_image(self) -> float:
        """Return the operations of a training step for one image: three forward passes.

        The discriminator is not counted.
        """
        size = self.config.data.image_size
        with (
            torch.device("meta"),
            torch.no_grad(),
            FlopCounterMode(display=False) as counter,
        ):
            self.plain_network(torch.empty(1, 3, size, size))
        return 3.0 * counter.get_total_flops()
