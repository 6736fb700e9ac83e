"""Label maps as one-hot channels, and from logits back to maps.

"UViM: A Unified Modeling Approach for Vision with Learned Guiding Codes" (Kolesnikov et al., 2022)
describes panoptic maps by a class and an instance for each pixel, and depths by bins; "GIVT",
section 4.2, has taken this over. What is not in the papers is as in the released code of both.

Legend: b maps, H and W pixels, g groups of channels (semantics and instances; or bins), C channels.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from megavis.data.codecs.label_maps import UNITS_A_METRE, TargetKind


@dataclass(frozen=True)
class LabelChannels:
    """Groups of channels of which each pixel has one each.

    Attributes:
        kind: what maps show.
        sizes: channels of each group: void and classes, and void and segments; or bins.
        min_depth: of the first bin, in metres.
        max_depth: of the last bin.
    """

    kind: TargetKind
    sizes: tuple[int, ...]
    min_depth: float = 0.001
    max_depth: float = 10.0

    @property
    def num_channels(self) -> int:
        """C, of all groups."""
        return sum(self.sizes)

    def labels(self, maps: Tensor) -> Tensor:
        """Return the channel of each pixel, int64 `[b, g, H, W]`, of maps uint8 `[b, H, W, 3]`.

        A number of `sizes` or more stands for none, as of the hundredth of 100 segments. Depths
        outside of the range are in the first or the last bin, and those not measured in the first.
        """
        parts = maps.long().unbind(-1)
        if self.kind == "panoptic":
            return torch.stack(parts[:2], dim=1)
        metres = (parts[0] + 256 * parts[1] + 65536 * parts[2]).double() / UNITS_A_METRE
        share = (metres - self.min_depth) / (self.max_depth - self.min_depth)
        bins = (share * self.sizes[0]).floor().long().clamp(0, self.sizes[0] - 1)
        return bins[:, None]

    def loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Return the cross-entropy of each map, nats `[b]`: a mean over pixels, summed over groups.

        Pixels of the first bin of depths, which holds those not measured, do not count. A pixel of
        a group whose label stands for none adds nothing to the sum of which the mean is taken.

        Args:
            logits: `[b, C, ...]`.
            labels: int64 `[b, g, ...]`, pixels in the same order.
        """
        total = logits.new_zeros(len(logits), dtype=torch.float32)
        groups = logits.float().flatten(2).split(self.sizes, dim=1)
        for number, group in enumerate(groups):
            wanted = labels[:, number].flatten(1)
            known = wanted < group.shape[1]
            losses = F.cross_entropy(group, wanted.where(known, 0), reduction="none") * known
            if self.kind == "depth":
                counts = (wanted != 0).float()
                total = total + (losses * counts).sum(1) / counts.sum(1).clamp(min=1.0)
            else:
                total = total + losses.mean(1)
        return total

    def maps(self, logits: Tensor) -> Tensor:
        """Return the maps uint8 `[b, H, W, 3]` that logits `[b, C, H, W]` stand for.

        Panoptic: a pixel belongs to its likeliest instance, and all pixels of an instance have the
        class with the largest sum of their logits. Depth: the middle of the likeliest bin.
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
    """Cut `[b, g, H, W]` into patches in raster order, `[b, n, p², g]`."""
    rows = maps.unflatten(2, (-1, patch_size)).unflatten(4, (-1, patch_size))
    return rows.permute(0, 2, 4, 3, 5, 1).flatten(3, 4).flatten(1, 2)


def unpatch_pixels(patches: Tensor, patch_size: int, *, rows: int) -> Tensor:
    """Undo `patch_pixels` for patches `[b, n, p², C]` of `rows` rows of patches."""
    grid = patches.unflatten(1, (rows, -1)).unflatten(3, (patch_size, patch_size))
    return grid.permute(0, 5, 1, 3, 2, 4).flatten(4, 5).flatten(2, 3)


def embed_labels(table: Tensor, labels: Tensor, channels: LabelChannels, patch_size: int) -> Tensor:
    """Map one-hot channels linearly, patch by patch: `[b, n, h]`.

    The product of a matrix with a one-hot vector is a row of it, so rows are looked up and summed.

    Args:
        table: `[p² · C, h]`, pixel by pixel and channel by channel.
        labels: int64 `[b, g, H, W]`; those that stand for none add nothing.
        channels: the groups.
        patch_size: p.
    """
    device = labels.device
    sizes = torch.tensor(channels.sizes, device=device)
    first = sizes.cumsum(0) - sizes
    patches = patch_pixels(labels, patch_size)
    known = patches < sizes
    pixel = torch.arange(patch_size**2, device=device)[:, None] * channels.num_channels
    rows = (pixel + first + patches.where(known, 0)).flatten(0, 1).flatten(1)
    weights = known.to(table.dtype).flatten(0, 1).flatten(1)
    summed = F.embedding_bag(rows, table, mode="sum", per_sample_weights=weights)
    return summed.unflatten(0, patches.shape[:2])


def resize_tokens(tokens: Tensor, *, rows: int, to: int) -> Tensor:
    """Resize a square grid of tokens `[b, rows², h]` to `[b, to², h]`, linearly and antialiased."""
    if rows == to:
        return tokens
    grid = tokens.transpose(1, 2).unflatten(2, (rows, rows)).float()
    resized = F.interpolate(grid, size=(to, to), mode="bilinear", antialias=True)
    return resized.flatten(2).transpose(1, 2).to(tokens.dtype)
