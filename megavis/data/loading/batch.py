"""The micro-batch that every objective receives."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch


@dataclass(frozen=True)
class Batch:
    """A micro-batch of one data-parallel rank.

    Attributes:
        inputs: decoded samples. Palette and other ids: int64 `[b, n]` in raster order, each below
            the vocabulary size. Images: uint8 `[b, h, w, 3]`, cropped, in 0 .. 255. Pairs: uint8
            `[b, 2, h, w, 3]`, the image and its target. Latents: float16 `[b, 2, c, h, w]`, mean
            then scale. Frames: float16 `[b, n, d]`.
        labels: class of each sample, int64 `[b]`; -1 if it has none.
        sample_index: int64 `[b]`; the position of each sample in the endless sample stream (in
            evaluation, its index in the data set). All per-sample randomness is seeded by it, so a
            sample gets the same draws in every layout.
    """

    inputs: torch.Tensor
    labels: torch.Tensor
    sample_index: torch.Tensor

    def __len__(self) -> int:
        return self.inputs.shape[0]

    def unlabelled(self) -> Batch:
        """Return the batch without labels."""
        return replace(self, labels=torch.full_like(self.labels, -1))

    def to(self, device: torch.device | str, *, non_blocking: bool = False) -> Batch:
        """Move the batch to `device`; `non_blocking` has an effect only with pinned memory."""
        return Batch(
            inputs=self.inputs.to(device, non_blocking=non_blocking),
            labels=self.labels.to(device, non_blocking=non_blocking),
            sample_index=self.sample_index.to(device, non_blocking=non_blocking),
        )

    def pin_memory(self) -> Batch:
        """Return a copy in pinned memory. Raises RuntimeError without a GPU."""
        return Batch(
            inputs=self.inputs.pin_memory(),
            labels=self.labels.pin_memory(),
            sample_index=self.sample_index.pin_memory(),
        )
