"""The `modulated_mlp` decoder: residual MLPs over a noisy token, modulated by backbone and level.

"Autoregressive Image Generation without Vector Quantization", section 3.2 and appendix, and its
released code: the sum of the backbone's output and an embedding of the noise level gives each
layer's norm a shift and a scale and its branch a gate, and the last norm a shift and a scale.
Modulation and the last linear map are initialised to zero, so that the first prediction is zero.
Weights do not decay. The norms are layer norms, whatever the backbone's are.

All of it is replicated in the tensor group. Legend: b images, s positions, w width, d values of a
token.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megavis.densities.noise_levels import noise_levels
from megavis.grammar import words
from megavis.model.embeddings import ReplicatedLinear
from megavis.model.modulation import OF_NORM, modulate
from megavis.model.parameters import normal, set_decay, zeros

FREQUENCIES = 256
"""Sines and cosines that represent a noise level."""
OF_LAYER = 3
"""Vectors that a layer needs: shift, scale and gate."""
_EPSILON = 1e-6
_LONGEST = 10_000.0
"""Period of the slowest wave, over 2π."""


class ModulatedDecoder(nn.Module):
    """Modulated residual layers, and a modulated last norm with a linear map.

    Args:
        width: width of all layers.
        num_outputs: values predicted for each token.
        keys: the config's, of which the noise levels are read.
    """

    def __init__(
        self, width: int, num_layers: int, num_outputs: int, keys: words.Diffusion
    ) -> None:
        super().__init__()
        self.level = LevelEmbedding(width, keys)
        self.layers = nn.ModuleList(ModulatedLayer(width) for _ in range(num_layers))
        self.norm = nn.LayerNorm(width, _EPSILON, elementwise_affine=False)
        self.modulation = ReplicatedLinear(width, OF_NORM * width, zeros)
        self.linear = ReplicatedLinear(width, num_outputs, zeros)
        for parameter in self.parameters():
            set_decay(parameter, "never")

    def forward(self, output: Tensor, noisy: Tensor, gamma: Tensor) -> Tensor:
        """Predict `[b, s, num_outputs]`.

        Args:
            output: the backbone's output, mapped to this width, `[b, s, w]`.
            noisy: embedded noisy tokens `[b, s, w]`.
            gamma: their γ, float32 `[b, s, 1]`.
        """
        vector = F.silu(output + self.level(gamma))
        hidden = noisy
        for layer in self.layers:
            hidden = layer(hidden, vector)
        shift, scale = self.modulation(vector).chunk(OF_NORM, dim=-1)
        return self.linear(modulate(self.norm(hidden), shift, scale))


class ModulatedLayer(nn.Module):
    """x + gate · MLP(norm(x) · (1 + scale) + shift), with a SiLU between two square matrices."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width, _EPSILON)
        self.inner, self.outer = (ReplicatedLinear(width, width) for _ in range(2))
        self.modulation = ReplicatedLinear(width, OF_LAYER * width, zeros)

    def forward(self, hidden: Tensor, vector: Tensor) -> Tensor:
        """Map `[b, s, w]` to the same shape, given the vectors after their SiLU, `[b, s, w]`."""
        shift, scale, gate = self.modulation(vector).chunk(OF_LAYER, dim=-1)
        normed = modulate(self.norm(hidden), shift, scale)
        return hidden + gate * self.outer(F.silu(self.inner(normed)))


class LevelEmbedding(nn.Module):
    """Embeds a noise level: sinusoids of its time, and an MLP of two layers."""

    def __init__(self, width: int, keys: words.Diffusion) -> None:
        super().__init__()
        self.keys = keys
        self.inner = ReplicatedLinear(FREQUENCIES, width, normal(0.02))
        self.outer = ReplicatedLinear(width, width, normal(0.02))

    def forward(self, gamma: Tensor) -> Tensor:
        """Map γ, float32 `[b, s, 1]`, to `[b, s, w]`."""
        # In float32: bfloat16 cannot represent all steps up to 999.
        times = noise_levels(self.keys, gamma.device).times(gamma.float())
        return self.outer(F.silu(self.inner(_waves(times))))


def _waves(times: Tensor) -> Tensor:
    """Return cosines and then sines of times `[..., 1]`, from fast to slow: `[..., 256]`."""
    half = FREQUENCIES // 2
    rates = torch.arange(half, dtype=torch.float32, device=times.device)
    angles = times * torch.exp(-math.log(_LONGEST) / half * rates)
    return torch.cat([angles.cos(), angles.sin()], dim=-1)


def flops(width: int, num_layers: int) -> float:
    """Return the operations for an embedded noisy token before the last map."""
    level = FREQUENCIES * width + width**2
    return 2.0 * (level + ((2 + OF_LAYER) * num_layers + OF_NORM) * width**2)
