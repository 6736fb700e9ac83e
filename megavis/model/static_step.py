"""Decode a token over tensors that stay where they are, so that a CUDA graph can replay it.

The position is a tensor, and attention hides the part of the cache that is not written yet. A graph
saves the host's time, which at small batches is longer than the device's. On a CPU the same is
computed without a graph; it has not been run on a GPU yet.

Legend: b images, n heads of this process, d head size, h hidden size, t tokens, L blocks.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

REACH = 256
"""A static step sees a multiple of so many tokens, or all: there is a graph for each multiple."""


class SingleTokenBlock(Protocol):
    """A block that `decoding.py` has prepared for single tokens."""

    def run_(
        self,
        hidden: Tensor,
        write: Callable[[Tensor], object],
        keys: Tensor,
        values: Tensor,
        turn: Tensor | None,
        unseen: Tensor | None = None,
    ) -> None:
        """Apply the block to hidden states `[b, h]` in place."""


class StaticStep:
    """All blocks on a token, over a part of the cache; a CUDA graph on a GPU.

    Every call reads and writes the same memory: `hidden`, `turn` and `position` are copied in, the
    result is copied out.

    Args:
        cache: `[L, 2, b, n, capacity, d]`.
        reach: number of tokens that it may see.
        hidden: hidden states like those of each call.
        turn: rotations likewise.
    """

    def __init__(
        self,
        blocks: Sequence[SingleTokenBlock],
        cache: Tensor,
        reach: int,
        hidden: Tensor,
        turn: Tensor | None,
    ) -> None:
        self._rooms = [(block, room) for block, room in zip(blocks, cache, strict=True)]
        self._reach = reach
        self._hidden, self._result = hidden.clone(), torch.empty_like(hidden)
        self._turn = None if turn is None else turn.clone()
        self._position = torch.zeros(1, dtype=torch.int64, device=hidden.device)
        self._tokens = torch.arange(reach, device=hidden.device)
        self._graph: torch.cuda.CUDAGraph | None = None

    def __call__(self, hidden: Tensor, turn: Tensor | None, position: int) -> Tensor:
        """Return the hidden states `[b, h]` of the token at a position, after all blocks."""
        self._hidden.copy_(hidden)
        self._position.fill_(position)
        if self._turn is not None and turn is not None:
            self._turn.copy_(turn)
        if not hidden.is_cuda:
            self._run()
        else:
            if self._graph is None:
                self._graph = self._captured()
            self._graph.replay()
        return self._result.clone()

    def _run(self) -> None:
        self._result.copy_(self._hidden)
        unseen = self._tokens > self._position
        for block, room in self._rooms:
            seen = room.flatten(1, 2)[:, :, : self._reach]
            block.run_(
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

    def _captured(self) -> torch.cuda.CUDAGraph:
        # Warm up on another stream: capturing allows no first use of a library.
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            self._run()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self._run()
        return graph
