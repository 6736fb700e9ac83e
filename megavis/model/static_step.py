"""A decoding step on tensors with fixed addresses, so that a CUDA graph can replay it.

The position is a tensor, and attention hides the part of the cache that is not written yet. A graph
whose result differs from the step that it replays is not used. A CPU runs the same step without a
graph.

Legend: b images, n heads of this process, d head size, h hidden size, L blocks.
"""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

logger = logging.getLogger(__name__)

_GRAPH_TOLERANCE = 2**-6
"""Largest difference of a graph's result from the step's, relative to the largest value: kernels
are the same, and bf16 has eight significant bits."""


class StaticStep:
    """Runs all blocks on one token over part of the cache; a CUDA graph on a GPU.

    Every call reads and writes the same memory: `hidden`, `turn` and `position` are copied in, the
    result is copied out.

    Args:
        runs: adds a block's output to the hidden states, for each block
            (`IncrementalDecoder`).
        cache: `[L, 2, b, n, capacity, d]`.
        reach: number of cached tokens that a step may see.
        hidden: hidden states of the shape that each call gets.
        turn: rotations likewise.
        strict: raise RuntimeError instead of continuing without a graph.
    """

    def __init__(
        self,
        runs: Sequence[Callable[..., None]],
        cache: Tensor,
        reach: int,
        hidden: Tensor,
        turn: Tensor | None,
        *,
        strict: bool,
    ) -> None:
        self._strict = strict
        self._rooms = list(zip(runs, cache, strict=True))
        self._reach = reach
        self._hidden, self._result = hidden.clone(), torch.empty_like(hidden)
        self._turn = None if turn is None else turn.clone()
        self._position = torch.zeros(1, dtype=torch.int64, device=hidden.device)
        self._tokens = torch.arange(reach, device=hidden.device)
        self._replay: Callable[[], None] | None = None

    def __call__(self, hidden: Tensor, turn: Tensor | None, position: int) -> Tensor:
        """Return the hidden states `[b, h]` of the token at a position, after all blocks."""
        self._hidden.copy_(hidden)
        self._position.fill_(position)
        if self._turn is not None and turn is not None:
            self._turn.copy_(turn)
        # The first call runs the step itself; its result is what the graph must reproduce.
        if self._replay is None:
            self._run()
            self._replay = self._as_graph()
        else:
            self._replay()
        # Clone, since the next call overwrites it.
        return self._result.clone()

    def _run(self) -> None:
        self._result.copy_(self._hidden)
        # A float mask, made once for all blocks: SDPA would convert a boolean one in each.
        unseen = self._result.new_zeros(self._reach)
        unseen.masked_fill_(self._tokens > self._position, -math.inf)
        for run_, room in self._rooms:
            seen = room.flatten(1, 2)[:, :, : self._reach]
            run_(
                self._result,
                functools.partial(self._write, room),
                seen[0].transpose(1, 2),
                seen[1],
                self._turn,
                unseen,
            )

    def _write(self, room: Tensor, new: Tensor) -> None:
        """Write a token's keys and values `[2, b, n, d]` to a cache `[2, b, n, capacity, d]`."""
        room.index_copy_(3, self._position, new.unsqueeze(3))

    def _as_graph(self) -> Callable[[], None]:
        """Return the replay of a graph of `_run`, which has just run, or `_run` if that fails."""
        wanted = self._result.clone()
        try:
            replay = captured(self._run, wanted.device)
            # An empty graph would otherwise leave the step's result in place and pass the check.
            self._result.zero_()
            replay()
        # Also a RuntimeError, but not one to continue from without a graph: the caller halves the
        # batch.
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            reason = f"could not be captured: {error}"
        else:
            error_bound = _GRAPH_TOLERANCE * float(wanted.abs().max())
            if torch.allclose(self._result, wanted, rtol=0, atol=error_bound, equal_nan=True):
                return replay
            reason = "computes different numbers"
        if self._strict:
            raise RuntimeError(f"a CUDA graph of a step {reason}")
        logger.warning("generating without CUDA graphs, which is slower: a graph %s", reason)
        # The replay has overwritten the result of this call.
        self._result.copy_(wanted)
        return self._run


def captured(run: Callable[[], None], device: torch.device) -> Callable[[], None]:
    """Return the replay of a CUDA graph of a function, or the function itself on a CPU.

    Raises:
        RuntimeError: it cannot be captured.
    """
    if device.type != "cuda":
        return run
    # Warm up on another stream: libraries cannot be initialized during capture.
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    # Other threads, such as NCCL's watchdog or one that writes a checkpoint, may use the GPU.
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        run()
    return graph.replay
