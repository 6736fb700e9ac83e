"""The VAE of label maps as a tokenizer: maps to mean and scale of latents, and latents to maps.

A plain Transformer with the weights of a run of `vae_label_maps`, by the names of that run's
checkpoint; what is trained is partitioned (`papers/vae/label_maps.py`).

Legend: b maps, H and W pixels, n patches, h hidden size, d channels of a latent, l latents a side.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megavis.config.errors import UserError
from megavis.data.codecs.label_maps import TargetKind
from megavis.parallel.device import full_float32
from megavis.tokenizers.label_channels import (
    LabelChannels,
    embed_labels,
    resize_tokens,
    unpatch_pixels,
)
from megavis.tokenizers.network_tokenizer import LatentTokenizer
from megavis.tokenizers.vae import Posterior, bounded_posterior


@dataclass(frozen=True)
class LabelMapShape:
    """Sizes of the network.

    Attributes:
        target: what maps show.
        channels: of each group; see `LabelChannels`.
        depth_range: least and largest depth in metres.
        image_size: side of a map in pixels.
        patch_size: side of a patch.
        downsampling: pixels on the side of a latent.
        latent_channels: d.
        hidden_size: h.
        mlp_size: width of the MLP.
        num_heads: attention heads.
        encoder_layers: blocks.
        decoder_layers: likewise.
        norm_epsilon: of every norm.
        activation: of the MLP.
    """

    target: TargetKind
    channels: tuple[int, ...]
    depth_range: tuple[float, float]
    image_size: int
    patch_size: int
    downsampling: int
    latent_channels: int
    hidden_size: int
    mlp_size: int
    num_heads: int
    encoder_layers: int
    decoder_layers: int
    norm_epsilon: float
    activation: Literal["gelu", "gelu_tanh"]

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> LabelMapShape:
        """Return the sizes that a run's config describes."""
        paper, model = config["objective"], config["model"]
        channels: tuple[int, ...]
        if paper["target"] == "panoptic":
            channels = (paper["semantic_channels"], paper["instance_channels"])
        else:
            channels = (paper["depth_bins"],)
        least, largest = paper["depth_range"]
        return cls(
            paper["target"],
            channels,
            (least, largest),
            config["data"]["image_size"],
            paper["patch_size"],
            paper["downsampling"],
            paper["latent_channels"],
            model["hidden_size"],
            model.get("ffn_hidden_size") or 4 * model["hidden_size"],
            model["num_attention_heads"],
            model["num_layers"],
            paper["decoder_layers"],
            model["norm_epsilon"],
            model["activation"],
        )

    @property
    def label_channels(self) -> LabelChannels:
        """The groups of channels."""
        return LabelChannels(self.target, self.channels, *self.depth_range)

    @property
    def grid(self) -> int:
        """Patches on a side."""
        return self.image_size // self.patch_size

    @property
    def latent_grid(self) -> int:
        """Latents l on a side."""
        return self.image_size // self.downsampling


class LabelMapVAE(LatentTokenizer):
    """A trained network.

    Args:
        shape: sizes of the network.
    """

    kind = "vae_label_maps"
    prefix = ""

    def __init__(self, shape: LabelMapShape) -> None:
        super().__init__(asdict(shape))
        self.shape = shape
        self.embedding = _Input(shape)
        self.blocks = _blocks(shape, shape.encoder_layers)
        self.bottleneck = _Bottleneck(shape)
        self.decoder = _blocks(shape, shape.decoder_layers)
        self.head = _Output(shape)

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> LabelMapVAE:
        """Return the network of a run's config, with fresh weights."""
        return cls(LabelMapShape.from_config(config))

    @property
    def target_kind(self) -> TargetKind:
        """What the maps show."""
        return self.shape.target

    def latent_shape(self, image_size: int) -> tuple[int, int, int]:
        """Return c, h, w; raises UserError for another size than that of training."""
        if image_size != self.shape.image_size:
            raise UserError(
                f"this VAE was trained on label maps of {self.shape.image_size}² pixels, not"
                f" {image_size}²"
            )
        return self.shape.latent_channels, self.shape.latent_grid, self.shape.latent_grid

    @torch.no_grad()
    @full_float32()
    def encode(self, images: Tensor) -> Tensor:
        """Return mean then scale, float32 `[b, 2, d, l, l]`, of maps uint8 `[b, H, W, 3]`."""
        maps = images.to(self.head.linear.weight.device)
        hidden = self.blocks(self.embedding(self.shape.label_channels.labels(maps)))
        posterior = self.bottleneck.posterior(hidden)
        return torch.stack([posterior.mean, posterior.scale], dim=1)

    def logits(self, latents: Tensor) -> Tensor:
        """Return logits `[b, C, H, W]` of latents `[b, d, l, l]`."""
        hidden = self.decoder(self.bottleneck.enter(latents))
        patches: Tensor = self.head(hidden).unflatten(2, (self.shape.patch_size**2, -1))
        return unpatch_pixels(patches, self.shape.patch_size, rows=self.shape.grid)

    @torch.no_grad()
    @full_float32()
    def decode(self, latents: Tensor) -> Tensor:
        """Return maps uint8 `[b, H, W, 3]` of latents `[b, d, l, l]`."""
        latents = latents.to(self.head.linear.weight.device).float()
        return self.shape.label_channels.maps(self.logits(latents))


class _Input(nn.Module):
    def __init__(self, shape: LabelMapShape) -> None:
        super().__init__()
        self.shape, width = shape, shape.hidden_size
        rows = shape.patch_size**2 * shape.label_channels.num_channels
        self.table = nn.Parameter(torch.zeros(rows, width))
        self.bias = nn.Parameter(torch.zeros(width))
        self.positions = nn.Embedding(shape.grid**2, width)

    def forward(self, labels: Tensor) -> Tensor:
        patches = embed_labels(self.table, labels, self.shape.label_channels, self.shape.patch_size)
        hidden: Tensor = patches + self.bias + self.positions.weight
        return hidden


class _Attention(nn.Module):
    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.linear_q = nn.Linear(width, width)
        self.linear_kv = nn.Linear(width, 2 * width)
        self.linear_proj = nn.Linear(width, width)

    def forward(self, hidden: Tensor) -> Tensor:
        query = self.linear_q(hidden).unflatten(2, (self.num_heads, -1)).transpose(1, 2)
        # Head by head, each head's keys before its values.
        pairs = self.linear_kv(hidden).unflatten(2, (self.num_heads, 2, -1))
        key, value = (part.transpose(1, 2) for part in pairs.unbind(3))
        mixed = F.scaled_dot_product_attention(query, key, value)
        projected: Tensor = self.linear_proj(mixed.transpose(1, 2).flatten(2))
        return projected


class _Block(nn.Module):
    def __init__(self, shape: LabelMapShape) -> None:
        super().__init__()
        width = shape.hidden_size
        self.approximate = "tanh" if shape.activation == "gelu_tanh" else "none"
        self.input_layernorm = nn.LayerNorm(width, shape.norm_epsilon)
        self.self_attention = _Attention(width, shape.num_heads)
        self.pre_mlp_layernorm = nn.LayerNorm(width, shape.norm_epsilon)
        self.mlp = nn.ModuleDict(
            {
                "linear_fc1": nn.Linear(width, shape.mlp_size),
                "linear_fc2": nn.Linear(shape.mlp_size, width),
            }
        )

    def forward(self, hidden: Tensor) -> Tensor:
        hidden = hidden + self.self_attention(self.input_layernorm(hidden))
        inner = self.mlp["linear_fc1"](self.pre_mlp_layernorm(hidden))
        activated = F.gelu(inner, approximate=self.approximate)
        return hidden + self.mlp["linear_fc2"](activated)


def _blocks(shape: LabelMapShape, count: int) -> nn.Sequential:
    return nn.Sequential(*(_Block(shape) for _ in range(count)))


class _Bottleneck(nn.Module):
    def __init__(self, shape: LabelMapShape) -> None:
        super().__init__()
        self.shape, width, channels = shape, shape.hidden_size, shape.latent_channels
        self.norm = nn.LayerNorm(width, shape.norm_epsilon)
        self.moments = nn.Linear(width, 2 * channels)
        self.linear = nn.Linear(channels, width)
        self.positions = nn.Embedding(shape.grid**2, width)

    def posterior(self, hidden: Tensor) -> Posterior:
        small = resize_tokens(self.norm(hidden), rows=self.shape.grid, to=self.shape.latent_grid)
        moments = self.moments(small).transpose(1, 2)
        return bounded_posterior(moments.unflatten(2, (self.shape.latent_grid, -1)))

    def enter(self, latents: Tensor) -> Tensor:
        tokens = self.linear(latents.flatten(2).transpose(1, 2))
        large = resize_tokens(tokens, rows=self.shape.latent_grid, to=self.shape.grid)
        return large + self.positions.weight


class _Output(nn.Module):
    def __init__(self, shape: LabelMapShape) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(shape.hidden_size, shape.norm_epsilon)
        rows = shape.patch_size**2 * shape.label_channels.num_channels
        self.linear = nn.Linear(shape.hidden_size, rows)

    def forward(self, hidden: Tensor) -> Tensor:
        logits: Tensor = self.linear(self.norm(hidden))
        return logits
