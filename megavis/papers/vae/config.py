"""Config keys of the VAEs, of images (sizes: table 6 of GIVT) and of label maps."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field

from megavis.config.autoencoder import AutoencoderConfig
from megavis.config.schema import (
    ConfigIssue,
    NonNegative,
    ObjectiveConfig,
    Positive,
    RunConfig,
)
from megavis.config.section import Above0, AtLeast0
from megavis.grammar.checks import check_split
from megavis.grammar.faults import nearest_divisors
from megavis.tokenizers.shapes import VAEShape


class VAEConfig(AutoencoderConfig):
    """Config keys of the VAE."""

    name: Literal["vae"] = "vae"
    latent_channels: Positive = 16
    """d, channels of a latent."""
    layers: Literal["maskgit", "taming"] = "maskgit"
    """`maskgit`: the layers of GIVT's VAE. `taming`: those of latent diffusion's VAEs, as in the
    VQGAN: residual blocks with biases, attention, and convolutions around the latents."""
    attention_levels: Annotated[tuple[NonNegative, NonNegative], Field(strict=False)] = (1, 1)
    """With `layers: taming`: number of coarsest levels with attention in encoder and decoder; the
    middle always has attention."""
    beta: AtLeast0 = 5e-5
    """β, weight of the KL divergence from N(0, 1); 1e-5 for the Large models (table 5)."""
    kl_normalization: Literal["sum", "mean"] = "sum"
    """`sum`: nats per image, summed over all latents (section 3.1 flattens them); `mean`: nats per
    value. Neither the paper nor the code states which of them the image VAE used."""

    @property
    def shape(self) -> VAEShape:
        """Sizes of the network."""
        return VAEShape.from_section(dict(self))

    def check(self, config: RunConfig) -> Iterator[ConfigIssue]:
        """Check the levels with attention too."""
        yield from super().check(config)
        levels, key = list(self.attention_levels), "objective.attention_levels"
        if self.layers != "taming":
            if self.attention_levels != VAEShape.attention_levels:
                yield key, f"{levels} is for layers: taming; {self.layers} has no attention"
        elif max(levels) > len(self.multipliers):
            yield key, f"{levels} are more than the {len(self.multipliers)} levels of multipliers"


class LabelMapVAEConfig(ObjectiveConfig):
    """Config keys of the VAE of label maps: channels, bottleneck and loss.

    `model` describes the encoder; the decoder differs from it only in its number of blocks.
    """

    name: Literal["vae_label_maps"] = "vae_label_maps"
    target: Literal["panoptic", "depth"] = "panoptic"
    """Kind of the label maps."""
    semantic_channels: Annotated[int, Field(ge=2, le=256)] = 134
    """Channels for the classes of a panoptic map, including void; 1 + 133 for COCO."""
    instance_channels: Annotated[int, Field(ge=2, le=256)] = 100
    """Channels for the segments of a panoptic map, including void; further segments are ignored."""
    depth_bins: Annotated[int, Field(ge=2)] = 256
    """Number of equal bins in `depth_range`."""
    depth_range: Annotated[tuple[AtLeast0, Above0], Field(strict=False)] = (0.001, 10.0)
    """Smallest and largest depth in metres."""
    patch_size: Positive = 16
    """Side of a patch in pixels; a patch is a token of encoder and decoder."""
    downsampling: Positive = 32
    """Side in pixels of the square that a latent represents; the grid of tokens is resized to the
    grid of latents and back."""
    latent_channels: Positive = 16
    """d, channels of a latent. The released COCO config of the VAE has 32, the paper and the
    released second stage 16."""
    decoder_layers: Positive = 12
    """Blocks of the decoder."""
    beta: AtLeast0 = 2.5e-4
    """β, weight of the KL divergence from N(0, 1) in nats per map; 2.5e-4 for COCO, 2e-4 for
    NYU."""

    def num_further_blocks(self, config: RunConfig) -> int:
        """Return the blocks of the decoder."""
        return self.decoder_layers

    @property
    def num_channels(self) -> int:
        """One-hot channels of a pixel."""
        if self.target == "depth":
            return self.depth_bins
        return self.semantic_channels + self.instance_channels

    def check(self, config: RunConfig) -> Iterator[ConfigIssue]:
        """Check that patches and latents tile the map, and that the tokenizer supports `model`."""
        side = config.data.image_size
        if side % self.patch_size:
            sizes = nearest_divisors(self.patch_size, side)
            text = f"{self.patch_size} does not divide data.image_size {side}; set it to {sizes}"
            yield "objective.patch_size", text
        if side % self.downsampling:
            yield "objective.downsampling", f"{self.downsampling} does not divide the side {side}"
        if self.depth_range[0] >= self.depth_range[1]:
            yield "objective.depth_range", f"{list(self.depth_range)} must begin with the smaller"
        tokens = (side // self.patch_size) ** 2
        for fault in check_split(config, tokens, what=f"{tokens} patches", changes=()):
            yield fault.key, f"{fault.text}; change objective.patch_size, or {fault.remedy}"
        yield from _check_blocks(config)


def _check_blocks(config: RunConfig) -> Iterator[ConfigIssue]:
    """Check the keys of `model` that the tokenizer, a separate network, does not implement."""
    model = config.model
    needed = {
        "normalization": ("layer_norm",),
        "norm_bias": ("all",),
        "activation": ("gelu", "gelu_tanh"),
        "positions": (None, "learned"),
    }
    for key, allowed in needed.items():
        if getattr(model, key) not in allowed:
            words = " or ".join(str(value) for value in allowed if value is not None)
            yield f"model.{key}", f"{getattr(model, key)} does not fit label maps; use {words}"
    if not (model.add_bias and model.has_biased_attention):
        yield "model.add_bias", "false does not fit label maps, whose VAE has biases; use true"
    if model.qk_norm:
        yield (
            "model.qk_norm",
            "true does not fit label maps, whose VAE has no such norms; use false",
        )
    if model.drop_path:
        yield "model.drop_path", f"{model.drop_path} does not fit label maps; use 0"
