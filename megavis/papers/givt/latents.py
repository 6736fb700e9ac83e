"""Config keys that all forms of GIVT share, and what they mean.

Where paper and released code differ, the docstring of the key says how; defaults are the code's.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import ClassVar, Literal

from megavis.config.schema import ConfigIssue, Fraction, NonNegative, Positive, RunConfig
from megavis.config.section import Above0, AtLeast0, ScaleActivation
from megavis.grammar.grammar import Grammar
from megavis.grammar.paper import PaperConfig, Renamed
from megavis.grammar.words import (
    Adapter,
    AnyDensity,
    CorrelatedGaussian,
    GaussianMixture,
    InitialWeights,
    Labels,
    Latents,
    OneByOne,
    Shift,
)


class LatentTokensConfig(PaperConfig):
    """Config keys of all forms of GIVT."""

    names: ClassVar[Mapping[str, str | Renamed]] = {
        "reads.patch_size": "downsampling",
        "reads.channels": "latent_channels",
        "reads.stacked": "stacked_latents",
        "condition.dropout": "label_dropout",
        "transform": Renamed("adapter_blocks", "set it to 0"),
        "transform.blocks": Renamed("adapter_blocks", "set it to 0"),
        "transform.bottleneck": "adapter_bottleneck",
    }

    latent_channels: Positive = 16
    """Channels of a latent, d of the VAE."""
    downsampling: Positive = 16
    """Pixels per latent along each side."""
    stacked_latents: Positive = 1
    """Horizontally adjacent latents stacked into one token; 2 for Large at 512² (table 5)."""
    num_classes: NonNegative = 1000
    """Number of classes; 0 trains without labels."""
    label_dropout: Fraction = 0.1
    """Probability of the null label in training; 0: there is no null label, and no guidance. The
    paper does not state it; the released code has 0.1."""
    num_components: Positive = 16
    """k, components of the mixture."""
    covariance: Literal["diagonal", "full"] = "diagonal"
    """`full`: a single Gaussian with full covariance; requires num_components 1."""
    scale_activation: ScaleActivation = "squareplus"
    """Map from outputs to scales: `squareplus` in the released code, `softplus` in the paper."""
    scale_floor: Above0 = 1e-6
    """Smallest scale: 1e-6 in the released code, 1e-5 in the paper (appendix C.1)."""
    head_std: AtLeast0 = 0.02
    """Initial standard deviation of the last matrix. It is 0 in the released code, where all
    components are initially equal and only rounding separates them, differently in each layout."""
    adapter_blocks: NonNegative = 0
    """Coupling blocks of the jointly trained adapter; 8 in the paper, 0 for no adapter."""
    adapter_bottleneck: Positive | None = None
    """Hidden channels of the adapter; defaults to 4 · channels of a token, as in the paper. The
    released code has 8 · channels of a token at 512²."""
    tokenizer: str | None = None
    """Run folder of the VAE, which encodes jpeg shards on the fly and decodes samples."""
    tokenizer_beta: AtLeast0 | None = None
    """β required of the VAE in `tokenizer`, checked against its run's config. None: any."""

    def own_faults(self, run: RunConfig) -> Iterator[ConfigIssue]:
        """Check that a full covariance has one component."""
        if self.covariance == "full" and self.num_components != 1:
            text = f"{self.num_components} Gaussians cannot have a full covariance; use 1"
            yield "objective.num_components", text

    def grammar(self, run: RunConfig) -> Grammar:
        """Return raster order, latent by latent, after the class (sections 3.1 and 3.2).

        Initial weights are those of the released code, with Flax's default for the latents' map.
        """
        adapter, blocks = None, self.adapter_blocks
        if blocks:
            adapter = Adapter(blocks=blocks, bottleneck=self.adapter_bottleneck)
        return Grammar(
            reads=Latents(
                channels=self.latent_channels,
                patch_size=self.downsampling,
                stacked=self.stacked_latents,
                tokenizer=self.tokenizer,
                tokenizer_beta=self.tokenizer_beta,
            ),
            schedule=OneByOne(),
            asks=Shift(),
            density=self._density(),
            condition=self.labels(),
            transform=adapter,
            weights=InitialWeights(blocks="lecun", vectors="lecun", positions="width", tokens=1.0),
            positions=run.model.positions or "learned",
        )

    def labels(self) -> Labels | None:
        """Return the classes; without them the first row is a learned start token."""
        if not self.num_classes:
            return None
        return Labels(num_classes=self.num_classes, dropout=self.label_dropout)

    def _density(self) -> AnyDensity:
        if self.covariance == "full":
            return CorrelatedGaussian(
                scale_activation=self.scale_activation,
                scale_floor=self.scale_floor,
                head_std=self.head_std,
            )
        return GaussianMixture(
            num_components=self.num_components,
            scale_activation=self.scale_activation,
            scale_floor=self.scale_floor,
            head_std=self.head_std,
        )
