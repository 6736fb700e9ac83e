"""The trained VAE of label maps as a tokenizer: one-hot channels, and the network.

"UViM: A Unified Modeling Approach for Vision with Learned Guiding Codes" (Kolesnikov et al., 2022)
represents a panoptic map by a class and an instance per pixel, and a depth map by bins; "GIVT",
section 4.2, does the same. Details that are in neither paper follow their released code.

The network runs on one device. Its parameters have the names that a `vae_label_maps` run saves.
Training partitions the Transformers (`papers/vae/label_maps.py`); what lies between pixels, tokens
and latents is the same code.

Legend: b maps; H and W, height and width in pixels; g groups of channels (classes and instances, or
depth bins), C channels in total; n patches of p × p pixels; h, hidden size; l × l latents of d
channels.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megavis.config.errors import UserError
from megavis.data.codecs.label_maps import UNITS_A_METRE, TargetKind
from megavis.parallel.device import full_float32
from megavis.tokenizers.network_tokenizer import LatentTokenizer
from megavis.tokenizers.vae import bounded_posterior


@dataclass(frozen=True)
class LabelChannels:
    """Groups of one-hot channels; a pixel has one label per group.

    Attributes:
        sizes: channels per group: void and classes, and void and segments; or depth bins.
        min_depth: lower bound of the first bin, in metres.
        max_depth: upper bound of the last bin, in metres.
    """

    kind: TargetKind
    sizes: tuple[int, ...]
    min_depth: float = 0.001
    max_depth: float = 10.0

    @property
    def num_channels(self) -> int:
        """C, channels in total."""
        return sum(self.sizes)

    def labels(self, maps: Tensor) -> Tensor:
        """Return the labels int64 `[b, g, H, W]` of maps uint8 `[b, H, W, 3]`.

        A label of at least its group's size has no channel, such as segment 100 of 100 channels.
        Depths out of range are in the first or last bin, unknown depths in the first.
        """
        parts = maps.long().unbind(-1)
        if self.kind == "panoptic":
            return torch.stack(parts[:2], dim=1)
        # In float64: float32 puts some depths at the edge of a bin, such as 5.0005 m, into its
        # neighbour.
        metres = (parts[0] + 256 * parts[1] + 65536 * parts[2]).double() / UNITS_A_METRE
        share = (metres - self.min_depth) / (self.max_depth - self.min_depth)
        bins = (share * self.sizes[0]).floor().long().clamp(0, self.sizes[0] - 1)
        return bins[:, None]

    def loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Return the cross-entropy in nats, `[b]`: the mean over pixels, summed over groups.

        In depth maps, pixels of the first bin, which includes unknown depths, are excluded from the
        mean. In panoptic maps, labels without a channel contribute zero to it.

        Logits are `[b, C, ...]`, labels int64 `[b, g, ...]` with pixels in the same order.
        """
        total = logits.new_zeros(len(logits), dtype=torch.float32)
        groups = logits.float().flatten(2).split(self.sizes, dim=1)
        for number, group in enumerate(groups):
            wanted = labels[:, number].flatten(1)
            # `ignore_index` is a single label, but here all labels from the group's size on have no
            # channel.
            known = wanted < group.shape[1]
            losses = F.cross_entropy(group, wanted.where(known, 0), reduction="none") * known
            if self.kind == "depth":
                counts = (wanted != 0).float()
                # A crop may have no known depth.
                total = total + (losses * counts).sum(1) / counts.sum(1).clamp(min=1.0)
            else:
                total = total + losses.mean(1)
        return total

    def maps(self, logits: Tensor) -> Tensor:
        """Return the most likely maps uint8 `[b, H, W, 3]` for logits `[b, C, H, W]`.

        Panoptic: a pixel gets its most likely instance, and all pixels of an instance get the class
        with the largest sum of logits over them. Depth: the center of the most likely bin.
        """
        logits = logits.float()
        if self.kind == "depth":
            bins = logits.argmax(1).double() + 0.5
            metres = bins / self.sizes[0] * (self.max_depth - self.min_depth) + self.min_depth
            numbers = (metres * UNITS_A_METRE).round().long()
            parts = (numbers & 255, (numbers >> 8) & 255, numbers >> 16)
            return torch.stack(parts, dim=-1).to(torch.uint8)
        semantics, instances = logits.split(self.sizes, dim=1)
        segments = instances.argmax(1)
        index = segments.flatten(1)[:, None].expand(-1, self.sizes[0], -1)
        sums = logits.new_zeros(len(logits), *self.sizes)
        sums.scatter_add_(2, index, semantics.flatten(2))
        classes = sums.argmax(1).gather(1, segments.flatten(1)).view_as(segments)
        parts = (classes, segments, torch.zeros_like(classes))
        return torch.stack(parts, dim=-1).to(torch.uint8)


def patch_pixels(maps: Tensor, patch_size: int) -> Tensor:
    """Divide `[b, g, H, W]` into patches `[b, n, p², g]`, patches and pixels in raster order."""
    rows = maps.unflatten(2, (-1, patch_size)).unflatten(4, (-1, patch_size))
    return rows.permute(0, 2, 4, 3, 5, 1).flatten(3, 4).flatten(1, 2)


def unpatch_pixels(patches: Tensor, patch_size: int, *, rows: int) -> Tensor:
    """Invert `patch_pixels`: `[b, n, p², C]`, in `rows` rows of patches, to `[b, C, H, W]`."""
    grid = patches.unflatten(1, (rows, -1)).unflatten(3, (patch_size, patch_size))
    return grid.permute(0, 5, 1, 3, 2, 4).flatten(4, 5).flatten(2, 3)


def embed_labels(table: Tensor, labels: Tensor, channels: LabelChannels, patch_size: int) -> Tensor:
    """Multiply the one-hot channels of each patch by a matrix: `[b, n, h]`.

    The product of a matrix and a one-hot vector is a row of the matrix, so look rows up and sum.

    Args:
        table: `[p² · C, h]`, pixels in raster order, the channels of a pixel together.
        labels: int64 `[b, g, H, W]`; those without a channel contribute nothing.
    """
    device = labels.device
    sizes, first = _group_extents(channels.sizes, device)
    patches = patch_pixels(labels, patch_size)
    known = patches < sizes
    pixel = torch.arange(patch_size**2, device=device)[:, None] * channels.num_channels
    rows = (pixel + first + patches.where(known, 0)).flatten(0, 1).flatten(1)
    weights = known.to(table.dtype).flatten(0, 1).flatten(1)
    summed = F.embedding_bag(rows, table, mode="sum", per_sample_weights=weights)
    return summed.unflatten(0, patches.shape[:2])


@functools.cache
def _group_extents(sizes: tuple[int, ...], device: torch.device) -> tuple[Tensor, Tensor]:
    """Return size and first channel of each group, int64 `[g]`, copied once per device."""
    counts = torch.tensor(sizes, device=device)
    return counts, counts.cumsum(0) - counts


def resize_tokens(tokens: Tensor, *, rows: int, to: int) -> Tensor:
    """Resize a square grid of tokens, `[b, rows², h]` to `[b, to², h]`: bilinear, antialiased."""
    if rows == to:
        return tokens
    grid = tokens.transpose(1, 2).unflatten(2, (rows, rows)).float()
    resized = F.interpolate(grid, size=(to, to), mode="bilinear", antialias=True)
    return resized.flatten(2).transpose(1, 2).to(tokens.dtype)


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

    def logits(self, outputs: Tensor) -> Tensor:
        """Arrange the head's outputs `[b, n, p² · C]` as logits `[b, C, H, W]`."""
        patches = outputs.unflatten(2, (self.patch_size**2, -1))
        return unpatch_pixels(patches, self.patch_size, rows=self.grid)


class LabelMapInput(nn.Module):
    """Linear embedding of patches of one-hot channels; subclasses add positions."""

    def __init__(self, shape: LabelMapShape) -> None:
        super().__init__()
        self.shape = shape
        rows = shape.patch_size**2 * shape.label_channels.num_channels
        self.table = nn.Parameter(torch.zeros(rows, shape.hidden_size))
        self.bias = nn.Parameter(torch.zeros(shape.hidden_size))

    def embed(self, labels: Tensor) -> Tensor:
        """Embed labels int64 `[b, g, H, W]` as `[b, n, h]`."""
        channels, size = self.shape.label_channels, self.shape.patch_size
        return embed_labels(self.table, labels, channels, size) + self.bias


class LabelMapBottleneck(nn.Module):
    """From the encoder's tokens to moments, and from latents to the decoder's tokens.

    Subclasses build `moments`, a linear map of h to 2 d, and `linear`, one of d to h.
    """

    moments: nn.Module
    linear: nn.Module

    def __init__(self, shape: LabelMapShape) -> None:
        super().__init__()
        self.shape = shape

    def moments_of(self, normed: Tensor) -> Tensor:
        """Map normalised tokens `[b, n, h]` to means, then log-variances: `[b, 2 d, l, l]`."""
        small = resize_tokens(normed, rows=self.shape.grid, to=self.shape.latent_grid)
        moments: Tensor = self.moments(small).transpose(1, 2)
        return moments.unflatten(2, (self.shape.latent_grid, -1))

    def tokens_of(self, latents: Tensor) -> Tensor:
        """Embed latents `[b, d, l, l]` as `[b, n, h]`, without positions."""
        tokens = self.linear(latents.flatten(2).transpose(1, 2))
        return resize_tokens(tokens, rows=self.shape.latent_grid, to=self.shape.grid)


class LabelMapVAE(LatentTokenizer):
    """A trained VAE of label maps."""

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
        """Return (d, l, l). Raises UserError unless `image_size` is as in training."""
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
        posterior = bounded_posterior(self.bottleneck.moments_of(self.bottleneck.norm(hidden)))
        return torch.stack([posterior.mean, posterior.scale], dim=1)

    def logits(self, latents: Tensor) -> Tensor:
        """Decode latents `[b, d, l, l]` to logits `[b, C, H, W]`."""
        tokens = self.bottleneck.tokens_of(latents) + self.bottleneck.positions.weight
        return self.shape.logits(self.head(self.decoder(tokens)))

    @torch.no_grad()
    @full_float32()
    def decode(self, latents: Tensor) -> Tensor:
        """Decode latents `[b, d, l, l]` to the most likely maps uint8 `[b, H, W, 3]`."""
        latents = latents.to(self.head.linear.weight.device).float()
        return self.shape.label_channels.maps(self.logits(latents))


class _Input(LabelMapInput):
    def __init__(self, shape: LabelMapShape) -> None:
        super().__init__(shape)
        self.positions = nn.Embedding(shape.grid**2, shape.hidden_size)

    def forward(self, labels: Tensor) -> Tensor:
        return self.embed(labels) + self.positions.weight


class _Attention(nn.Module):
    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.linear_qkv = nn.Linear(width, 3 * width)
        self.linear_proj = nn.Linear(width, width)

    def forward(self, hidden: Tensor) -> Tensor:
        # Megatron's order: for each head, its queries, its keys and its values.
        heads = self.linear_qkv(hidden).unflatten(2, (self.num_heads, 3, -1))
        mixed = F.scaled_dot_product_attention(*heads.permute(3, 0, 2, 1, 4))
        return self.linear_proj(mixed.transpose(1, 2).flatten(2))


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


class _Bottleneck(LabelMapBottleneck):
    def __init__(self, shape: LabelMapShape) -> None:
        super().__init__(shape)
        width, channels = shape.hidden_size, shape.latent_channels
        self.norm = nn.LayerNorm(width, shape.norm_epsilon)
        self.moments = nn.Linear(width, 2 * channels)
        self.linear = nn.Linear(channels, width)
        self.positions = nn.Embedding(shape.grid**2, width)


class _Output(nn.Module):
    def __init__(self, shape: LabelMapShape) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(shape.hidden_size, shape.norm_epsilon)
        rows = shape.patch_size**2 * shape.label_channels.num_channels
        self.linear = nn.Linear(shape.hidden_size, rows)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.linear(self.norm(hidden))
