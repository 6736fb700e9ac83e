"""The trained VAE of label maps as a tokenizer: maps to latents, and latents to maps.

The network runs on one device. Its parameters have the names that a `vae_label_maps` run saves;
training uses the partitioned network in `papers/vae/label_maps.py`.

Legend: b maps; H and W, height and width in pixels; C channels in total; n patches; h, hidden size;
l × l latents of d channels.
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
        channels: per group; see `LabelChannels`.
        depth_range: smallest and largest depth in metres.
        image_size: side of a map in pixels.
        patch_size: side of a patch in pixels.
        downsampling: side in pixels of the square that a latent represents.
        mlp_size: width of the MLP.
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
        """Return the sizes in a run's config."""
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
        """Groups of one-hot channels."""
        return LabelChannels(self.target, self.channels, *self.depth_range)

    @property
    def grid(self) -> int:
        """Patches along a side of the map."""
        return self.image_size // self.patch_size

    @property
    def latent_grid(self) -> int:
        """l, latents along a side of the map."""
        return self.image_size // self.downsampling


class LabelMapVAE(LatentTokenizer):
    """A trained VAE of label maps.

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
        """Build the network of a run's config, with initial weights."""
        return cls(LabelMapShape.from_config(config))

    @property
    def target_kind(self) -> TargetKind:
        """Kind of the label maps."""
        return self.shape.target

    def latent_shape(self, image_size: int) -> tuple[int, int, int]:
        """Return (d, l, l). Raises UserError unless `image_size` is that of training."""
        if image_size != self.shape.image_size:
            raise UserError(
                f"this VAE was trained on label maps of {self.shape.image_size}² pixels, not"
                f" {image_size}²"
            )
        return self.shape.latent_channels, self.shape.latent_grid, self.shape.latent_grid

    @torch.no_grad()
    @full_float32()
    def encode(self, images: Tensor) -> Tensor:
        """Encode maps uint8 `[b, H, W, 3]` as means and scales, float32 `[b, 2, d, l, l]`."""
        maps = images.to(self.head.linear.weight.device)
        hidden = self.blocks(self.embedding(self.shape.label_channels.labels(maps)))
        posterior = self.bottleneck.posterior(hidden)
        return torch.stack([posterior.mean, posterior.scale], dim=1)

    def logits(self, latents: Tensor) -> Tensor:
        """Decode latents `[b, d, l, l]` to logits `[b, C, H, W]`."""
        hidden = self.decoder(self.bottleneck.enter(latents))
        patches: Tensor = self.head(hidden).unflatten(2, (self.shape.patch_size**2, -1))
        return unpatch_pixels(patches, self.shape.patch_size, rows=self.shape.grid)

    @torch.no_grad()
    @full_float32()
    def decode(self, latents: Tensor) -> Tensor:
        """Decode latents `[b, d, l, l]` to the most likely maps uint8 `[b, H, W, 3]`."""
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
        # Megatron's order: for each head, its keys and then its values.
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
