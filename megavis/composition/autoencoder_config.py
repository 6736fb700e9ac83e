"""The keys that a VAE and a VQGAN in training share: sizes, weights of the losses, rates."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, ClassVar

from pydantic import Field

from megavis.config.schema import ConfigIssue, Fraction, ObjectiveConfig, Positive, RunConfig
from megavis.config.section import Above0, AtLeast0


class AutoencoderConfig(ObjectiveConfig):
    """Keys of the losses, and the sizes that all of them have."""

    has_blocks: ClassVar[bool] = False

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
    """Residual blocks a level; a VAE has as many in the middle, a VQGAN's decoder one more each."""
    norm_groups: Positive = 32
    """Groups of each group norm; 32 in the papers. Narrow networks need fewer: a group of one
    channel forgets how bright it was."""
    reconstruction_weight: AtLeast0 = 1.0
    """Of the squared error, averaged over pixels and channels in [0, 1]."""
    perceptual_weight: AtLeast0 = 0.1
    """Of the distance in VGG-16's features; 0 switches it off."""
    perceptual_weights: str | None = None
    """File of VGG-16 weights (.safetensors or .pth, torchvision's names)."""
    adversarial_weight: AtLeast0 = 0.1
    """Of the non-saturating adversarial loss; 0 trains without a discriminator."""
    r1_weight: AtLeast0 = 10.0
    """γ of the penalty γ/2 · ‖∇D(x)‖² on the discriminator's slope at images."""
    discriminator_filters: Positive = 64
    """Channels of the discriminator's first level."""
    discriminator_learning_rate: Above0 | None = None
    """Peak rate of the discriminator; optimizer.learning_rate when absent."""
    discriminator_betas: Annotated[tuple[Fraction, Fraction], Field(strict=False)] | None = None
    """Adam's decay rates for the discriminator; optimizer.betas when absent."""

    @property
    def downsampling(self) -> int:
        """Pixels on the side of one place of the grid between encoder and decoder."""
        return 2 ** (len(self.multipliers) - 1)

    def check(self, config: RunConfig) -> Iterator[ConfigIssue]:
        """Check that sizes divide, that a needed file is named, and that the layout is plain."""
        if self.filters % self.norm_groups:
            text = f"{self.filters} is no multiple of objective.norm_groups {self.norm_groups}"
            yield "objective.filters", text
        if config.data.image_size % self.downsampling:
            text = f"{config.data.image_size} is not divisible by {self.downsampling}, the"
            yield "data.image_size", f"{text} pixels on the side of a latent"
        if self.perceptual_weight and self.perceptual_weights is None:
            text = "names a file of VGG-16 weights and must be given; or set perceptual_weight: 0"
            yield "objective.perceptual_weights", text
        yield from self._check_layout(config)

    def _check_layout(self, config: RunConfig) -> Iterator[ConfigIssue]:
        parallel = config.parallel
        for key in ("tensor_model_parallel_size", "pipeline_model_parallel_size"):
            if getattr(parallel, key) > 1:
                text = f"a {self.name} is trained data-parallel; the only legal choice is 1"
                yield f"parallel.{key}", text
        if parallel.zero_stage == 3:
            text = "3 splits weights that the penalty differentiates twice; use 2"
            yield "parallel.zero_stage", text
        if parallel.activation_checkpointing != "none":
            yield "parallel.activation_checkpointing", "is for Transformer blocks; use none"
