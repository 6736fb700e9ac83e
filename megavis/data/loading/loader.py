"""Load the batches of one data-parallel rank, prefetched in threads.

Step t consumes the positions [t*B, (t+1)*B) of the endless sample stream, where B = micro-batch
size * data-parallel size * accumulation steps; the micro-batches of the ranks tile them. The
samples of a step therefore depend only on B, not on the layout, and the step number is the loader's
only state.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from threading import Condition
from typing import Generic, Self, TypeVar

import numpy as np
import torch

from megavis.config.errors import UserError
from megavis.data.loading.blended_dataset import Samples
from megavis.data.loading.dataset import ShardDataset
from megavis.data.loading.order import Order, RepeatedOrder
from megavis.parallel.progress_bar import shown

DEFAULT_THREADS = 4
# Finished reads to keep ready, so that one slow read does not stall the consumer.
_SPARE = 2


@dataclass(frozen=True)
class Batch:
    """A micro-batch of one data-parallel rank.

    Attributes:
        inputs: decoded samples. Palette and other ids: int64 `[b, n]` in raster order, each below
            the vocabulary size. Images: uint8 `[b, h, w, 3]`, cropped, in 0 .. 255. Pairs: uint8
            `[b, 2, h, w, 3]`, the image and its target. Latents: float16 `[b, 2, c, h, w]`, mean
            then scale. Frames: float32 `[b, n, d]`.
        labels: class of each sample, int64 `[b]`; -1 if it has none.
        sample_index: int64 `[b]`; the position of each sample in the endless sample stream (in
            evaluation, its index in the data set). All per-sample randomness is seeded by it, so a
            sample gets the same draws in every layout.
        step: the optimizer step that the batch is for, from 0; None outside of training.
        objects: of images with instances, the class of each object, int64 `[b, k]` from 1, 0 where
            an image has fewer, and its mask, uint8 `[b, k, h, w / 8]`, each bit a pixel.
        is_repeated: True if another process evaluates these samples too, so they must not count
            here: a process without samples of its own takes part in the pass.
    """

    inputs: torch.Tensor
    labels: torch.Tensor
    sample_index: torch.Tensor
    step: int | None = None
    objects: tuple[torch.Tensor, torch.Tensor] | None = None
    is_repeated: bool = False

    def __len__(self) -> int:
        return self.inputs.shape[0]

    def unlabelled(self) -> Batch:
        """Return the batch without labels."""
        return replace(self, labels=torch.full_like(self.labels, -1))

    def to(self, device: torch.device | str, *, non_blocking: bool = False) -> Batch:
        """Move the batch to `device`; `non_blocking` has an effect only with pinned memory."""
        return self._each(lambda tensor: tensor.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> Batch:
        """Return a copy in pinned memory. Raises RuntimeError without a GPU."""
        return self._each(torch.Tensor.pin_memory)

    def _each(self, change: Callable[[torch.Tensor], torch.Tensor]) -> Batch:
        objects = None
        if self.objects is not None:
            classes, masks = self.objects
            objects = change(classes), change(masks)
        return replace(
            self,
            inputs=change(self.inputs),
            labels=change(self.labels),
            sample_index=change(self.sample_index),
            objects=objects,
        )


Item = TypeVar("Item")


class Prefetcher(Generic[Item]):
    """Iterator over `read(first)`, `read(first + 1)`, ..., computed in threads, in order.

    Decoders and numpy release the GIL, so threads run in parallel. An exception in `read` is raised
    by the `next` call for its result and ends the iteration. At most `threads` + 2 results are in
    memory.

    Args:
        read: a thread-safe function. It must not refer to this object, which could then never be
            collected.
        end: argument to stop before; None for an endless iterator.
        threads: number of threads, 1 or more.
    """

    def __init__(
        self, read: Callable[[int], Item], *, first: int = 0, end: int | None = None, threads: int
    ) -> None:
        self._read, self._next, self._end = read, first, end
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="read-ahead")
        self._pending: deque[Future[Item]] = deque()
        self._depth = threads + _SPARE
        self._closed = False
        # Stop the threads of a prefetcher that is dropped without close().
        weakref.finalize(self, self._pool.shutdown, wait=False, cancel_futures=True)

    def __iter__(self) -> Iterator[Item]:
        return self

    def __next__(self) -> Item:
        self._fill()
        if not self._pending:
            self.close()
            raise StopIteration
        try:
            return self._pending.popleft().result()
        except Exception:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop the threads after their current reads. Can be called repeatedly."""
        self._closed = True
        self._pool.shutdown(wait=True, cancel_futures=True)
        self._pending.clear()

    def _fill(self) -> None:
        while not self._closed and len(self._pending) < self._depth and self._next != self._end:
            self._pending.append(self._pool.submit(self._read, self._next))
            self._next += 1


class InTurn:
    """Runs functions in the order of their numbers `first`, `first + 1`, ...

    Each number is submitted once, by a thread that may have to wait for lower ones.
    """

    def __init__(self, first: int) -> None:
        self._next, self._changed = first, Condition()

    def __call__(self, number: int, do: Callable[[], Item]) -> Item:
        """Run `do` after all lower numbers; return its result or raise its exception."""
        with self._changed:
            self._changed.wait_for(lambda: self._next == number)
            try:
                return do()
            finally:
                self._next += 1
                self._changed.notify_all()


class BatchLoader(Prefetcher[Batch]):
    """Endless iterator of a rank's micro-batches; `accumulation_steps` of them make a step.

    Args:
        seed: seed of the sample order.
        micro_batch_size: samples b per micro-batch and rank.
        data_parallel_rank: rank of this reader; tensor- and pipeline-parallel ranks with the same
            data-parallel rank get the same batches.
        start_step: first step; starting at a later step costs no more.
        repeats: number of copies of each sample (`RepeatedOrder`).
        device: destination of the batches; for a GPU they are in pinned memory.

    Raises:
        ValueError: a size is below 1, the rank is not below the size, or the step is negative.
    """

    def __init__(
        self,
        dataset: Samples,
        *,
        seed: int,
        micro_batch_size: int,
        data_parallel_rank: int,
        data_parallel_size: int,
        accumulation_steps: int,
        start_step: int = 0,
        threads: int = DEFAULT_THREADS,
        repeats: int = 1,
        device: torch.device | None = None,
    ) -> None:
        _check_sizes(micro_batch_size, data_parallel_rank, data_parallel_size)
        if min(accumulation_steps, threads) < 1 or start_step < 0:
            raise ValueError(
                "accumulation_steps and threads must be at least 1 and start_step at least 0"
            )
        order: Order = dataset.order(seed)
        if repeats > 1:
            order = RepeatedOrder(order, repeats)
        own = (np.arange(micro_batch_size) + data_parallel_rank * micro_batch_size).astype(np.int64)
        stride = data_parallel_size * micro_batch_size

        first = start_step * accumulation_steps
        in_turn = InTurn(first)

        def read(number: int) -> Batch:
            # A rank's micro-batches are evenly spaced, within and across steps.
            positions = own + number * stride
            # Shards fetched ahead are given up once reading of later samples begins.
            indices = in_turn(number, lambda: order.dataset_index(positions))
            batch = read_batch(dataset, indices, positions)
            if device is None or device.type != "cuda":
                return batch
            torch.cuda.set_device(device)  # new threads default to GPU 0
            return batch.pin_memory()

        self.accumulation_steps = accumulation_steps
        super().__init__(read, first=first, threads=threads)


def evaluation_batches(
    dataset: Samples,
    *,
    batch_size: int,
    data_parallel_rank: int = 0,
    data_parallel_size: int = 1,
    limit: int | None = None,
    label: str | None = "images",
) -> Iterator[Batch]:
    """Yield the first `limit` samples (default: all) once, in data set order.

    All ranks get the same number of batches, of `batch_size` samples but for the last, whose sizes
    differ by at most 1; a rank that would get none repeats a sample (`Batch.is_repeated`).
    `sample_index` is the index in the data set. `label` names the progress bar; None: no bar.

    Raises:
        ValueError: a size is below 1, or the rank is not below the size.
        UserError: there are no samples.
    """
    _check_sizes(batch_size, data_parallel_rank, data_parallel_size)
    count = len(dataset) if limit is None else min(limit, len(dataset))
    if count < 1:
        raise UserError(f"{dataset.directory} has no samples to evaluate")
    at_once = batch_size * data_parallel_size

    def read(number: int) -> Batch:
        start = number * at_once
        each, more = divmod(min(at_once, count - start), data_parallel_size)
        first = start + data_parallel_rank * each + min(data_parallel_rank, more)
        indices = np.arange(first, first + each + (data_parallel_rank < more), dtype=np.int64)
        if len(indices):
            return read_batch(dataset, indices, indices)
        # Every rank takes part in the same collectives.
        last = np.array([count - 1])
        return replace(read_batch(dataset, last, last), is_repeated=True)

    batches = _prefetched(read, -(-count // at_once))
    if label is None:
        return batches
    # The first rank, which shows the bar, reads one more where there is a remainder.
    return shown(batches, label, total=-(-count // data_parallel_size), size=len)


def round_robin_batches(
    dataset: Samples,
    *,
    batch_size: int,
    num_samples: int,
    data_parallel_rank: int,
    data_parallel_size: int,
) -> Iterator[Batch]:
    """Yield every `data_parallel_size`-th of the batches that a single process would read.

    All ranks get the same number of batches: a rank that runs out repeats the last one, which may
    be smaller than the others. `sample_index` is the index in the data set.

    Raises:
        ValueError: a size is below 1, or the rank is not below the size.
    """
    _check_sizes(batch_size, data_parallel_rank, data_parallel_size)
    if num_samples < 1:
        raise ValueError("there must be at least one sample")
    last = -(-num_samples // batch_size) - 1

    def read(turn: int) -> Batch:
        start = min(turn * data_parallel_size + data_parallel_rank, last) * batch_size
        indices = np.arange(start, min(start + batch_size, num_samples), dtype=np.int64)
        return read_batch(dataset, indices, indices)

    return _prefetched(read, last // data_parallel_size + 1)


def _prefetched(read: Callable[[int], Batch], count: int) -> Iterator[Batch]:
    with Prefetcher(read, end=count, threads=DEFAULT_THREADS) as batches:
        yield from batches


def read_batch(dataset: Samples, indices: np.ndarray, positions: np.ndarray) -> Batch:
    """Read samples `indices` `[b]` for `positions` `[b]`; raises as `dataset.read`."""
    samples, labels = dataset.read(indices, positions=positions)
    objects = None
    if samples.dtype.names is not None:
        # Fields of a structured array are not contiguous.
        classes, masks = (np.ascontiguousarray(samples[name]) for name in ("classes", "masks"))
        objects = torch.from_numpy(classes.astype(np.int64)), torch.from_numpy(masks)
        samples = np.ascontiguousarray(samples["image"])
    if samples.dtype == np.uint16:  # torch supports few operations on uint16
        samples = samples.astype(np.int64)
    return Batch(
        inputs=torch.from_numpy(samples),
        labels=torch.from_numpy(labels),
        sample_index=torch.from_numpy(positions.copy()),
        objects=objects,
    )


def _check_sizes(batch_size: int, rank: int, num_ranks: int) -> None:
    if batch_size < 1 or not 0 <= rank < num_ranks:
        raise ValueError(
            f"batch size {batch_size} must be at least 1 and rank {rank} lie in [0, {num_ranks})"
        )


def read_round_robin(dataset: ShardDataset, count: int) -> Batch:
    """Read `count` images: the first of each class, then the second of each, and so on."""
    indices = round_robin_by_class(dataset, count)
    return read_batch(dataset, indices, indices)


def round_robin_by_class(dataset: ShardDataset, count: int) -> np.ndarray:
    """Return int64 indices of `count` samples: the first of each class, then the second, ..."""
    seen: dict[int, int] = {}
    turns = []
    for index, label in enumerate(dataset.labels.tolist()):
        seen[label] = seen.get(label, 0) + 1
        turns.append((seen[label], label, index))
    return np.array([index for _, _, index in sorted(turns)[:count]], dtype=np.int64)
