"""Convert label maps to one-hot channels, and logits to label maps.

"UViM: A Unified Modeling Approach for Vision with Learned Guiding Codes" (Kolesnikov et al., 2022)
represents a panoptic map by a class and an instance per pixel, and a depth map by bins; "GIVT",
section 4.2, does the same. Details that are in neither paper follow their released code.

Legend: b maps; H and W, height and width in pixels; g groups of channels (classes and instances, or
depth bins), C channels in total; n patches of p × p pixels; h, hidden size.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from megavis.data.codecs.label_maps import UNITS_A_METRE, TargetKind


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
        metres = (parts[0] + 256 * parts[1] + 65536 * parts[2]).double() / UNITS_A_METRE
        share = (metres - self.min_depth) / (self.max_depth - self.min_depth)
        bins = (share * self.sizes[0]).floor().long().clamp(0, self.sizes[0] - 1)
        return bins[:, None]

    def loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Return the cross-entropy in nats, `[b]`: the mean over pixels, summed over groups.

        In depth maps, pixels of the first bin, which has the unknown depths, are left out of the
        mean. In panoptic maps, labels without a channel contribute zero to it.

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
        channels: groups of channels.
        patch_size: p.
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
