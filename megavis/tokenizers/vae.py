"""Convolutional β-VAEs as tokenizers: images to real-valued latents and back.

"GIVT: Generative Infinite-Vocabulary Transformers", section 3.1 and table 6; the layers are those
of MaskGIT's tokenizer without the quantizer. The VAEs of "High-Resolution Image Synthesis with
Latent Diffusion Models" (LDM), also used by MAR, have the VQGAN's layers. Resolution halves between
levels, so five levels downsample by 16, for any image size.

Legend: b images, H and W pixels, s side of a square image in pixels, h and w sides of the latent
grid, d (c as a tokenizer) channels of a latent.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megavis.parallel.device import full_float32
from megavis.tokenizers.network_tokenizer import (
    LatentTokenizer,
    grid_side,
    to_images,
    to_pixels,
)
from megavis.tokenizers.shapes import VAEShape, VQGANShape
from megavis.tokenizers.taming_layers import VQGANDecoder, VQGANEncoder, group_norm

# Bounds of GIVT's released code.
_LOWEST_LOG_VARIANCE, _HIGHEST_LOG_VARIANCE = -30.0, 20.0


class VAE(LatentTokenizer):
    """A trained `VAENetwork`."""

    kind = "vae"
    prefix = "vae."

    def __init__(self, shape: VAEShape) -> None:
        settings = asdict(shape)
        if shape.layers == VAEShape.layers:
            # Omit the default, so that networks trained before this option keep their identity.
            del settings["layers"], settings["attention_levels"]
        super().__init__(settings)
        self.shape = shape
        self.network = VAENetwork(shape)

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> VAE:
        """Build the network of a run of objective `vae`, with initial weights."""
        return cls(VAEShape.from_section(config["objective"]))

    def latent_shape(self, image_size: int) -> tuple[int, int, int]:
        """Return (c, h, w); raise UserError if downsampling does not divide the image size."""
        side = grid_side(image_size, self.shape.downsampling, network="VAE")
        return self.shape.latent_channels, side, side

    @torch.no_grad()
    @full_float32()
    def encode(self, images: Tensor) -> Tensor:
        """Encode images uint8 `[b, s, s, 3]` as means and scales, float32 `[b, 2, c, h, w]`."""
        posterior = self.network.posterior(to_pixels(images, self))
        return torch.stack([posterior.mean, posterior.scale], dim=1)

    @torch.no_grad()
    @full_float32()
    def decode(self, latents: Tensor) -> Tensor:
        """Decode latents `[b, c, h, w]` to images uint8 `[b, s, s, 3]`, clipped."""
        device = next(self.parameters()).device
        return to_images(self.network.decode(latents.to(device).float()))


@dataclass(frozen=True)
class Posterior:
    """q(z | image), a diagonal Gaussian over the latents.

    Attributes:
        mean: `[b, d, h, w]`.
        log_variance: `[b, d, h, w]`, in [-30, 20].
    """

    mean: Tensor
    log_variance: Tensor

    @property
    def scale(self) -> Tensor:
        """Standard deviations `[b, d, h, w]`."""
        return torch.exp(0.5 * self.log_variance)

    def sample(self, noise: Tensor) -> Tensor:
        """Return mean + scale · noise for standard normal noise `[b, d, h, w]`."""
        return self.mean + self.scale * noise

    def kl(self) -> Tensor:
        """Return KL(q ‖ N(0, 1)) per latent value in nats, float32 `[b, d, h, w]`.

        "Auto-Encoding Variational Bayes", appendix B: (μ² + σ² - 1 - log σ²) / 2.
        """
        mean, log_variance = self.mean.float(), self.log_variance.float()
        return 0.5 * (mean.square() + log_variance.exp() - 1.0 - log_variance)


def bounded_posterior(moments: Tensor) -> Posterior:
    """Return the posterior of means and log-variances `[b, 2 · d, h, w]`, clamping the latter."""
    mean, log_variance = moments.float().chunk(2, dim=1)
    return Posterior(mean, log_variance.clamp(_LOWEST_LOG_VARIANCE, _HIGHEST_LOG_VARIANCE))


class VAEResidualBlock(nn.Module):
    """A residual block of two sequences of norm, swish and 3×3 convolution."""

    def __init__(self, inputs: int, outputs: int, groups: int) -> None:
        super().__init__()
        self.norm_0 = group_norm(inputs, groups)
        self.conv_0 = nn.Conv2d(inputs, outputs, 3, padding=1, bias=False)
        self.norm_1 = group_norm(outputs, groups)
        self.conv_1 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        # As in the released code, the projected shortcut takes the convolutions' output.
        self.shortcut = None if inputs == outputs else nn.Conv2d(outputs, outputs, 1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Map `[b, inputs, h, w]` to `[b, outputs, h, w]`."""
        hidden = self.conv_0(F.silu(self.norm_0(x)))
        hidden = self.conv_1(F.silu(self.norm_1(hidden)))
        return hidden + (x if self.shortcut is None else self.shortcut(hidden))


class VAEEncoder(nn.Module):
    """Images to the moments of the posterior, or to any number of channels."""

    def __init__(self, shape: VAEShape, *, outputs: int | None = None) -> None:
        """Build with `outputs` output channels, by default 2 · d."""
        super().__init__()
        self.conv_in = nn.Conv2d(3, shape.filters, 3, padding=1, bias=False)
        self.levels = nn.ModuleList()
        width = shape.filters
        for multiplier in shape.multipliers:
            self.levels.append(_blocks(width, shape.filters * multiplier, shape))
            width = shape.filters * multiplier
        self.middle = _blocks(width, width, shape)
        self.norm = group_norm(width, shape.groups)
        self.conv_out = nn.Conv2d(width, outputs or 2 * shape.latent_channels, 1)

    def forward(self, pixels: Tensor) -> Tensor:
        """Map pixels `[b, 3, H, W]` in [0, 1] to `[b, outputs, h, w]`.

        By default these are means and log-variances, `[b, 2 · d, h, w]`.
        """
        x = self.conv_in(pixels)
        for number, level in enumerate(self.levels):
            x = level(x)
            if number < len(self.levels) - 1:
                # An odd last row or column is averaged without padding.
                x = F.avg_pool2d(x, 2, ceil_mode=True, count_include_pad=False)
        return self.conv_out(F.silu(self.norm(self.middle(x))))


class VAEDecoder(nn.Module):
    """Latents to images."""

    def __init__(self, shape: VAEShape) -> None:
        super().__init__()
        width = shape.filters * shape.multipliers[-1]
        self.conv_in = nn.Conv2d(shape.latent_channels, width, 3, padding=1)
        self.middle = _blocks(width, width, shape)
        self.levels = nn.ModuleList()
        self.enlargers = nn.ModuleList()
        for number, multiplier in reversed(list(enumerate(shape.multipliers))):
            self.levels.append(_blocks(width, shape.filters * multiplier, shape))
            width = shape.filters * multiplier
            if number > 0:
                self.enlargers.append(nn.Conv2d(width, width, 3, padding=1))
        self.norm = group_norm(width, shape.groups)
        self.conv_out = nn.Conv2d(width, 3, 3, padding=1)

    def forward(self, latents: Tensor) -> Tensor:
        """Map `[b, d, h, w]` to pixels `[b, 3, H, W]`, nominally in [0, 1], not clipped."""
        x = self.middle(self.conv_in(latents))
        for number, level in enumerate(self.levels):
            x = level(x)
            if number < len(self.enlargers):
                x = self.enlargers[number](F.interpolate(x, scale_factor=2.0, mode="nearest"))
        return self.conv_out(F.silu(self.norm(x)))


class VAENetwork(nn.Module):
    """Encoder and decoder."""

    def __init__(self, shape: VAEShape) -> None:
        super().__init__()
        self.shape, self.is_taming = shape, shape.layers == "taming"
        if self.is_taming:
            self._build_taming(shape)
            return
        self.encoder: nn.Module = VAEEncoder(shape)
        self.decoder: nn.Module = VAEDecoder(shape)
        initialize(self)

    def _build_taming(self, shape: VAEShape) -> None:
        """Build LDM's layers, with torch's initial weights, as in its code."""
        channels, (encoder, decoder) = shape.latent_channels, shape.attention_levels
        sizes = VQGANShape(
            filters=shape.filters,
            multipliers=shape.multipliers,
            blocks_per_level=shape.blocks_per_level,
            latent_channels=channels,
            norm_groups=shape.groups,
        )
        self.encoder = VQGANEncoder(sizes, attending=encoder, outputs=2 * channels)
        self.quant_conv = nn.Conv2d(2 * channels, 2 * channels, 1)
        self.post_quant_conv = nn.Conv2d(channels, channels, 1)
        self.decoder = VQGANDecoder(sizes, attending=decoder)

    def posterior(self, pixels: Tensor) -> Posterior:
        """Encode pixels `[b, 3, H, W]` in [0, 1]."""
        if self.is_taming:
            return bounded_posterior(self.quant_conv(self.encoder(2.0 * pixels - 1.0)))
        return bounded_posterior(self.encoder(pixels))

    def decode(self, latents: Tensor) -> Tensor:
        """Decode latents `[b, d, h, w]` to pixels `[b, 3, H, W]`, not clipped to [0, 1]."""
        if self.is_taming:
            pixels: Tensor = self.decoder(self.post_quant_conv(latents))
            return (pixels + 1.0) / 2.0
        decoded: Tensor = self.decoder(latents)
        return decoded

    def forward(self, pixels: Tensor, noise: Tensor) -> tuple[Tensor, Posterior]:
        """Reconstruct images `[b, 3, H, W]` in [0, 1] from a sample of the posterior.

        `noise` is standard normal, `[b, d, h, w]`.

        Returns:
            Reconstructed pixels, not clipped, and the posterior.
        """
        posterior = self.posterior(pixels)
        latents = posterior.sample(noise).to(pixels.dtype)
        return self.decode(latents), posterior


def _blocks(inputs: int, outputs: int, shape: VAEShape) -> nn.Sequential:
    widths = itertools.pairwise([inputs] + [outputs] * shape.blocks_per_level)
    return nn.Sequential(*(VAEResidualBlock(*pair, shape.groups) for pair in widths))


def initialize(network: nn.Module) -> None:
    """Initialise convolutions like the released code: LeCun normal (fan in), zero biases."""
    for module in network.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, nonlinearity="linear")
            if module.bias is not None:
                nn.init.zeros_(module.bias)
