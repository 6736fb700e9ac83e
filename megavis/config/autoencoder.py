"""Config keys of autoencoders, and checks against other keys."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, ClassVar

from pydantic import Field

from megavis.config.schema import ConfigIssue, Fraction, ObjectiveConfig, Positive, RunConfig
from megavis.config.section import Above0, AtLeast0


class AutoencoderConfig(ObjectiveConfig):
    """Keys of the `objective` section of an autoencoder."""

    has_blocks: ClassVar[bool] = False

    filters: Positive = 128
    """Channels of the first level, a multiple of `norm_groups`."""
    multipliers: Annotated[tuple[Positive, ...], Field(strict=False, min_length=1)] = (
        1,
        1,
        2,
        2,
        4,
    )
    """Channels of each level as multiples of `filters`; resolution halves between levels."""
    blocks_per_level: Positive = 2
    """Residual blocks per level. A VAE has equally many in the middle; a VQGAN's decoder has one
    more per level."""
    norm_groups: Positive = 32
    """Groups of each group norm; 32 in the papers. Narrow networks need fewer groups, since a group
    of one channel loses its mean."""
    reconstruction_weight: AtLeast0 = 1.0
    """Weight of the squared error of values in [0, 1], averaged over pixels and channels."""
    perceptual_weight: AtLeast0 = 0.1
    """Weight of the perceptual distance in VGG-16 features; 0 disables it."""
    perceptual_weights: str | None = None
    """File of VGG-16 weights (.safetensors or .pth, torchvision's names)."""
    adversarial_weight: AtLeast0 = 0.1
    """Weight of the non-saturating adversarial loss; 0 trains without a discriminator."""
    r1_weight: AtLeast0 = 10.0
    """γ of the R1 penalty γ/2 · ‖∇D(x)‖² at images."""
    discriminator_filters: Positive = 64
    """Channels of the discriminator's first level."""
    discriminator_learning_rate: Above0 | None = None
    """Peak learning rate of the discriminator; defaults to optimizer.learning_rate."""
    discriminator_betas: Annotated[tuple[Fraction, Fraction], Field(strict=False)] | None = None
    """Adam's betas of the discriminator; defaults to optimizer.betas."""

    @property
    def downsampling(self) -> int:
        """Pixels per latent along each side."""
        return 2 ** (len(self.multipliers) - 1)

    def check(self, config: RunConfig) -> Iterator[ConfigIssue]:
        """Check that sizes divide, VGG-16 weights are given if needed, and the layout is valid."""
        if self.filters % self.norm_groups:
            text = f"{self.filters} is not a multiple of objective.norm_groups {self.norm_groups}"
            yield "objective.filters", text
        if config.data.image_size % self.downsampling:
            text = f"{config.data.image_size} is not divisible by {self.downsampling}, the"
            yield "data.image_size", f"{text} side of a latent in pixels"
        if self.perceptual_weight and self.perceptual_weights is None:
            text = "must name a file of VGG-16 weights; or set perceptual_weight: 0"
            yield "objective.perceptual_weights", text
        yield from self._check_layout(config)

    def _check_layout(self, config: RunConfig) -> Iterator[ConfigIssue]:
        parallel = config.parallel
        for axis in ("tensor_model", "context", "pipeline_model"):
            key = f"{axis}_parallel_size"
            if getattr(parallel, key) > 1:
                text = f"a {self.name} supports only data parallelism; set it to 1"
                yield f"parallel.{key}", text
        if parallel.zero_stage == 3:
            text = "3 partitions weights that the R1 penalty differentiates twice; use 2"
            yield "parallel.zero_stage", text
        if parallel.activation_checkpointing != "none":
            yield "parallel.activation_checkpointing", "is for Transformer blocks; use none"
