"""Batches for one data-parallel rank, from the endless sample stream.

Step t consumes the B = micro * data-parallel size * accumulation positions [t*B, (t+1)*B); the
micro-batches of the ranks tile them. So the samples of a step depend on B alone, not on how it is
cut, and the number of the step is the loader's whole state.
"""

from __future__ import annotations

import queue
import threading
import weakref
from collections.abc import Callable, Iterator
from types import TracebackType

import numpy as np
import torch

from megavis.config.errors import UserError
from megavis.data.batch import Batch
from megavis.data.mixture import Samples

_PREFETCHED_BATCHES = 4
_POLL_SECONDS = 0.1


class BatchLoader:
    """Endless iterator of micro-batches; a background thread reads a few ahead.

    Each step gives `accumulation_steps` micro-batches. Use it as a context manager, or call
    `close`. What goes wrong in the thread is raised by the `next` that would have had the batch.

    Args:
        dataset: the samples.
        seed: of the sample order.
        micro_batch_size: samples b of one micro-batch of one rank.
        data_parallel_rank, data_parallel_size: which of how many readers this is; tensor- and
            pipeline-parallel ranks of one reader pass the same numbers and get the same batches.
        accumulation_steps: micro-batches a step.
        start_step: the step to begin with; costs the same for any step.

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
    ) -> None:
        _check_sizes(micro_batch_size, data_parallel_rank, data_parallel_size)
        if accumulation_steps < 1 or start_step < 0:
            raise ValueError("accumulation_steps must be at least 1 and start_step at least 0")
        self.dataset = dataset
        self.order = dataset.order(seed)
        self.micro_batch_size = micro_batch_size
        self.data_parallel_rank = data_parallel_rank
        self.data_parallel_size = data_parallel_size
        self.accumulation_steps = accumulation_steps
        self.start_step = start_step
        self._queue: queue.Queue[Batch | Exception] = queue.Queue(_PREFETCHED_BATCHES)
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        # A loader that is dropped without close() must not leave its thread behind.
        weakref.finalize(self, self._stop.set)

    def positions(self, step: int, *, micro_step: int) -> np.ndarray:
        """Return the positions int64 `[b]` that this rank reads in one micro-step of a step."""
        block = micro_step * self.data_parallel_size + self.data_parallel_rank
        blocks_per_step = self.accumulation_steps * self.data_parallel_size
        first = (step * blocks_per_step + block) * self.micro_batch_size
        return np.arange(first, first + self.micro_batch_size, dtype=np.int64)

    def read(self, step: int, *, micro_step: int) -> Batch:
        """Read one micro-batch of any step, in the calling thread; raises as the data set."""
        positions = self.positions(step, micro_step=micro_step)
        return read_batch(self.dataset, self.order.dataset_index(positions), positions)

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        if self._stop.is_set():
            raise StopIteration
        if self._thread is None:
            self._start()
        item = self._queue.get()
        if isinstance(item, Exception):
            self.close()
            raise item
        return item

    def __enter__(self) -> BatchLoader:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """End the thread; later `next` calls end the iteration. May be called again."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join()

    def _start(self) -> None:
        reader = _Reader(self)
        self._thread = threading.Thread(
            target=_fill, args=(reader, self._queue, self._stop), daemon=True, name="batches"
        )
        self._thread.start()


class _Reader:
    """What the thread needs; it must not hold the loader, or that would never be collected."""

    def __init__(self, loader: BatchLoader) -> None:
        self._dataset, self._order = loader.dataset, loader.order
        self._micro_batch_size = loader.micro_batch_size
        self._stride = loader.data_parallel_size * loader.micro_batch_size
        self._next = int(loader.positions(loader.start_step, micro_step=0)[0])
        self._device = torch.cuda.current_device() if torch.cuda.is_available() else None

    def __call__(self) -> Batch:
        # Micro-batches of one rank are evenly spaced, across steps as inside them.
        positions = np.arange(self._next, self._next + self._micro_batch_size, dtype=np.int64)
        self._next += self._stride
        batch = read_batch(self._dataset, self._order.dataset_index(positions), positions)
        if self._device is None:
            return batch
        torch.cuda.set_device(self._device)  # a new thread starts on GPU 0
        return batch.pin_memory()


def _fill(
    reader: Callable[[], Batch], batches: queue.Queue[Batch | Exception], stop: threading.Event
) -> None:
    while not stop.is_set():
        item: Batch | Exception
        try:
            item = reader()
        except Exception as error:
            item = error
        while not stop.is_set():
            try:
                batches.put(item, timeout=_POLL_SECONDS)
                break
            except queue.Full:
                continue
        if isinstance(item, Exception):
            return


def evaluation_batches(
    dataset: Samples,
    *,
    batch_size: int,
    data_parallel_rank: int,
    data_parallel_size: int,
    limit: int | None = None,
    drop_last: bool = False,
) -> Iterator[Batch]:
    """Yield the first `limit` samples (default: all) once, in the order of the data set.

    Every rank gets equally many batches of equal sizes: blocks of `batch_size` samples a rank,
    then one smaller batch with what is left, shared evenly. Only the last `count % data-parallel
    size` samples are dropped; with `drop_last` the smaller batch is dropped too, so that all
    batches have one size. `sample_index` is the index in the data set.

    Raises:
        ValueError: a size is below 1, or the rank is not below the size.
        UserError: there are too few samples to give every rank one.
    """
    _check_sizes(batch_size, data_parallel_rank, data_parallel_size)
    available = len(dataset) if limit is None else min(limit, len(dataset))
    unit = batch_size * data_parallel_size if drop_last else data_parallel_size
    count = available - available % unit
    if count < 1:
        raise UserError(
            f"{dataset.directory} gives {available} samples to evaluate, and at least {unit} are "
            f"needed on {data_parallel_size} data-parallel ranks"
        )
    return _evaluate(dataset, count, batch_size, data_parallel_rank, data_parallel_size)


def _evaluate(
    dataset: Samples, count: int, batch_size: int, rank: int, num_ranks: int
) -> Iterator[Batch]:
    for start in range(0, count, batch_size * num_ranks):
        each = min(batch_size, (count - start) // num_ranks)
        indices = np.arange(start + rank * each, start + (rank + 1) * each, dtype=np.int64)
        yield read_batch(dataset, indices, indices)


def read_batch(dataset: Samples, indices: np.ndarray, positions: np.ndarray) -> Batch:
    """Read samples `indices` `[b]` that stand at `positions` `[b]`; raises as the data set."""
    samples, labels = dataset.read(indices, positions=positions)
    if samples.dtype == np.uint16:  # ids; torch computes little with this type
        samples = samples.astype(np.int64)
    return Batch(
        inputs=torch.from_numpy(samples),
        labels=torch.from_numpy(labels),
        sample_index=torch.from_numpy(positions.copy()),
    )


def _check_sizes(batch_size: int, rank: int, num_ranks: int) -> None:
    if batch_size < 1 or not 0 <= rank < num_ranks:
        raise ValueError(
            f"batch size {batch_size} must be at least 1 and rank {rank} lie in [0, {num_ranks})"
        )
