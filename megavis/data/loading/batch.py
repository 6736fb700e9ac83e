"""One micro-batch, as every objective receives it."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch


@dataclass(frozen=True)
class Batch:
    """A micro-batch of one data-parallel rank.

    Attributes:
        inputs: what the shards hold. Palette and other ids: int64 `[b, n]` in raster order, each
            below the vocabulary size. Images: uint8 `[b, h, w, 3]`, cropped, in 0 .. 255. Pairs:
            uint8 `[b, 2, h, w, 3]`, the image and its target. Latents: float16 `[b, 2, c, h, w]`,
            mean then scale of each number. Frames: float16 `[b, n, d]`.
        labels: class of each sample as int64 `[b]`; -1 where a sample has none.
        sample_index: int64 `[b]`; the position of each sample in the endless sample stream (for
            evaluation: its index in the data set). It drives all per-sample randomness, so that
            a sample draws the same numbers in every layout.
    """

    inputs: torch.Tensor
    labels: torch.Tensor
    sample_index: torch.Tensor

    def __len__(self) -> int:
        return self.inputs.shape[0]

    def unlabelled(self) -> Batch:
        """Return the same samples without their classes."""
        return replace(self, labels=torch.full_like(self.labels, -1))

    def to(self, device: torch.device | str, *, non_blocking: bool = False) -> Batch:
        """Return the batch on `device`; `non_blocking` needs pinned memory to help."""
        return Batch(
            inputs=self.inputs.to(device, non_blocking=non_blocking),
            labels=self.labels.to(device, non_blocking=non_blocking),
            sample_index=self.sample_index.to(device, non_blocking=non_blocking),
        )

    def pin_memory(self) -> Batch:
        """Return a copy in page-locked memory. Raises RuntimeError where there is no GPU."""
        return Batch(
            inputs=self.inputs.pin_memory(),
            labels=self.labels.pin_memory(),
            sample_index=self.sample_index.pin_memory(),
        )
