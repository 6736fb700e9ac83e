"""The keys of GIVT, causal and masked.

Where paper and released code differ, the key says what each has; the default is the code's.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from megavis.composition.shared_keys import check_adapter, check_tokens
from megavis.config.choices import ScaleActivation
from megavis.config.schema import (
    ConfigIssue,
    Fraction,
    NonNegative,
    ObjectiveConfig,
    Positive,
    RunConfig,
)
from megavis.config.section import Above0, AtLeast0


class LatentTokensConfig(ObjectiveConfig):
    """What both models share."""

    latent_channels: Positive = 16
    """Numbers of a latent, d of the VAE."""
    downsampling: Positive = 16
    """Pixels on the side of a latent."""
    stacked_latents: Positive = 1
    """Neighbours of a row that are stacked into one token; 2 for Large at 512² (table 5)."""
    num_classes: NonNegative = 1000
    """Classes whose label comes first; 0 trains without labels."""
    label_dropout: Fraction = 0.1
    """Probability that the null label takes the place of the class; 0: there is none, and no
    guidance without the class. The paper names no number; the released code has 0.1."""
    num_components: Positive = 16
    """k of the mixture."""
    covariance: Literal["diagonal", "full"] = "diagonal"
    """`full`: a single Gaussian whose numbers depend on each other; num_components must be 1."""
    scale_activation: ScaleActivation = "squareplus"
    """From an output to a scale: `squareplus` in the released code, `softplus` in the paper."""
    scale_floor: Above0 = 1e-6
    """Smallest scale: 1e-6 in the released code, 1e-5 in the paper (appendix C.1)."""
    head_std: AtLeast0 = 0.02
    """Deviation of the last matrix at the start. 0 in the released code, where all components start
    alike and rounding alone parts them; then no two layouts do the same."""
    adapter_blocks: NonNegative = 0
    """Coupling blocks of the adapter that is trained jointly; 8 in the paper, 0: no adapter."""
    adapter_bottleneck: Positive | None = None
    """Its hidden channels; 4 · numbers of a token when absent, as in the paper. The released code
    has 8 · numbers of a token at 512²."""
    tokenizer: str | None = None
    """Run folder of the VAE, which encodes jpeg shards as they are read and decodes samples."""
    tokenizer_beta: AtLeast0 | None = None
    """β that the VAE of `tokenizer` must have been trained with, as its run's config says; another
    one is refused. None: any."""

    @property
    def token_size(self) -> int:
        """Numbers of a token."""
        return self.latent_channels * self.stacked_latents

    @property
    def num_outputs(self) -> int:
        """Numbers that the head gives for a token."""
        if self.covariance == "full":
            return self.token_size**2 + self.token_size
        return self.num_components * (1 + 2 * self.token_size)

    @property
    def missing_null_label(self) -> str | None:
        """The probability of dropping the class, where there are classes and it is 0."""
        has_none = self.num_classes > 0 and not self.label_dropout
        return "objective.label_dropout" if has_none else None

    @property
    def no_images(self) -> None:
        """All draw images."""
        return None

    def grid(self, config: RunConfig) -> tuple[int, int]:
        """Return height and width of the grid of tokens."""
        side = config.data.image_size // self.downsampling
        return side, side // self.stacked_latents

    def num_places(self, config: RunConfig) -> int:
        """Return the places of the sequence that goes through the blocks."""
        height, width = self.grid(config)
        return height * width

    def check(self, config: RunConfig) -> Iterator[ConfigIssue]:
        """Check that sizes divide, and that the head can give the covariance."""
        side, rest = divmod(config.data.image_size, self.downsampling)
        if rest or not side:
            text = f"{config.data.image_size} is not divisible by objective.downsampling"
            yield "data.image_size", f"{text} {self.downsampling}"
        if side % self.stacked_latents:
            text = f"{self.stacked_latents} does not divide the {side} latents of a row"
            yield "objective.stacked_latents", text
        if self.covariance == "full" and self.num_components != 1:
            text = f"{self.num_components} Gaussians cannot have a full covariance; use 1"
            yield "objective.num_components", text
        if self.tokenizer_beta is not None and self.tokenizer is None:
            yield "objective.tokenizer_beta", "needs objective.tokenizer, the run of that VAE"
        if self.adapter_blocks:
            yield from check_adapter(
                self.token_size,
                self.adapter_bottleneck,
                blocks_key="objective.adapter_blocks",
                bottleneck_key="objective.adapter_bottleneck",
            )
        places = self.num_places(config)
        yield from check_tokens(config, places, what=f"{places} places")


class GIVTConfig(LatentTokensConfig):
    """GIVT-Causal."""

    name: Literal["givt"] = "givt"
