"""Generate images in batches that fit, distributed over the processes.

On a GPU a batch has as many images as fit, unless the user chooses a number. This is measured: the
peak of a small batch, divided by its images, bounds what an image needs in a larger one, since part
of the peak, such as copies of weights, does not grow. Starting with one image, larger batches are
measured as long as that may change the bound. Images do not depend on the batch that they are in.

Legend: b images.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from megavis.config.errors import UserError
from megavis.parallel.context import Axis, ParallelContext
from megavis.parallel.progress_bar import shown

_UNMEASURED = 64
"""Batch size on a CPU. On a GPU, this many images or fewer run as one batch, halved if needed."""
_SHARE_TO_FILL = 0.8
"""Of the free memory: the rest is for fragments, libraries, and kernels that need more."""


class DeviceMemory:
    """The memory of a GPU, for tensors of this process."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def free(self) -> int:
        """Return the bytes that are free on the device, or reserved by torch and not in use."""
        free, _ = torch.cuda.mem_get_info(self.device)
        unused = torch.cuda.memory_reserved(self.device) - torch.cuda.memory_allocated(self.device)
        return free + unused

    def peak_of(self, job: Callable[[], object]) -> int:
        """Run a job and return the most bytes that its tensors took; resets torch's peak."""
        before = torch.cuda.memory_allocated(self.device)
        torch.cuda.reset_peak_memory_stats(self.device)
        job()
        return torch.cuda.max_memory_allocated(self.device) - before


@dataclass
class Batches:
    """The batches in which this process runs a function of images.

    Attributes:
        size: images per batch; None until `choose` has chosen it.
        halves: halve a batch that does not fit, and all after it; only for functions that
            communicate with no other process, which would wait.
        memory: of the device; None where nothing is measured, as on a CPU.
    """

    context: ParallelContext
    size: int | None
    halves: bool
    memory: DeviceMemory | None = None

    @classmethod
    def of(cls, context: ParallelContext, size: int | None, *, is_alone: bool) -> Batches:
        """Return batches of exactly `size` images; None: `choose` determines the size.

        `is_alone`: the function that runs in them communicates with no other process.
        """
        memory = DeviceMemory(context.device) if context.device.type == "cuda" else None
        return cls(context, size, halves=is_alone and size is None, memory=memory)

    def choose(self, generate: Callable[[Tensor], object], num_images: int) -> int:
        """Return the size; if there is none yet, choose the largest that fits all processes.

        Collective over all processes of the job.

        Args:
            generate: generates the images with the given indices, int64 `[b]`, to measure it.
            num_images: of the whole job.

        Raises:
            UserError: not even one image fits.
            torch.OutOfMemoryError: likewise, where processes share layers.
        """
        if self.size is None:
            mine = self._share(num_images)
            is_measured = self.memory is not None and (mine > _UNMEASURED or not self.halves)
            self.size = self._largest(generate, mine) if is_measured else min(mine, _UNMEASURED)
        return self.size

    def _share(self, num_images: int) -> int:
        """Return the number of images of each process, padded if they do not divide."""
        return -(-num_images // self.context.data.size)

    def _largest(self, generate: Callable[[Tensor], object], num_images: int) -> int:
        """Measure and return the largest size, of at most `num_images`."""
        tried = 1
        while True:
            fitting = min(num_images, self.context.smallest(self._fitting(generate, tried)))
            if fitting == 0:
                raise UserError(self._nothing_fits)
            # What is generated to measure is thrown away, so it stays a small share.
            larger = min(fitting, num_images // 8)
            if fitting == num_images or larger < 2 * tried:
                break
            tried = larger
        if fitting == num_images or fitting < 8:
            return fitting
        # Kernels prefer multiples of 8.
        return fitting - fitting % 8

    @property
    def _nothing_fits(self) -> str:
        return f"not even one image fits into the memory of {self.context.device}"

    def _fitting(self, generate: Callable[[Tensor], object], tried: int) -> int:
        """Run a batch of `tried` images and return how many would fit."""
        assert self.memory is not None
        free = self.memory.free()
        try:
            peak = self.memory.peak_of(lambda: generate(torch.arange(tried)))
        except torch.OutOfMemoryError:
            if not self.halves:
                raise
            return tried // 2
        # What has just run fits, whatever the share says.
        return max(tried, int(_SHARE_TO_FILL * free * tried / max(1, peak)))

    def run(self, job: Callable[[Tensor], Tensor], rows: Tensor) -> Tensor:
        """Apply a function to rows `[b, ...]` in batches, and concatenate what it returns.

        Raises:
            UserError: not even one image fits.
            torch.OutOfMemoryError: a batch does not fit, and is not halved.
        """
        assert self.size is not None, "choose it first"
        parts, rest = list[Tensor](), rows
        while len(rest):
            try:
                parts.append(job(rest[: self.size]))
            except torch.OutOfMemoryError:
                if not self.halves:
                    raise
                # Kept for all later batches: what did not fit once is not tried again.
                self.size = min(self.size, len(rest)) // 2
                if self.size == 0:
                    raise UserError(self._nothing_fits) from None
            else:
                rest = rest[self.size :]
        return torch.cat(parts)

    def distribute(self, generate: Callable[[Tensor], Tensor], num_images: int) -> Tensor:
        """Generate images in batches, distributed over the data-parallel processes.

        Collective over all processes of the job. `generate` returns the images with the given
        indices, int64 `[b]`, which may exceed `num_images`.

        Returns:
            All images in the order of their indices, the same on every process.

        Raises:
            UserError: see `choose`.
            torch.OutOfMemoryError: see `run`.
        """
        data = self.context.data
        # All processes generate the same number of images: under ZeRO-3 each forward pass gathers
        # weights, which is collective.
        share = self._share(num_images)
        numbers = torch.arange(data.rank * share, (data.rank + 1) * share)
        chunks = numbers.split(self.choose(generate, num_images))
        # What training shows is one batch, and needs no bar.
        bar = shown(chunks, "generating", total=share, size=len) if len(chunks) > 1 else chunks
        return _gather(torch.cat([self.run(generate, chunk) for chunk in bar]), data)[:num_images]


def _gather(mine: Tensor, data: Axis) -> Tensor:
    """Concatenate `[b, ...]` of all data-parallel processes by rank."""
    if data.size == 1:
        return mine
    parts = [torch.empty_like(mine) for _ in range(data.size)]
    dist.all_gather(parts, mine.contiguous(), group=data.group)
    return torch.cat(parts)
