"""Blocks compiled whole: `torch.compile` makes one graph of each Transformer block in training.

The graph takes the hidden states, what the block attends by, and the block's parameters. All blocks
of a stack share it, but for the last, which may compute fewer tokens: parameters are inputs of a
graph, not part of it. What a step computes once for all blocks (`Attention.prepared`) and drop
path's draws come from outside, and recomputation of a whole block runs the graph again.

Inductor draws dropout as torch does (`fallback_random`), so masks do not depend on whether blocks
are compiled. Norms and activation functions are recomputed in the backward pass as far as the
compiler finds that cheaper than keeping them.

Graphs are compiled when they are first needed, in the first step. If that fails, the process goes
on with `training.kernels: regions`; `training/callbacks/compilation.py` reports both.
"""

from __future__ import annotations

import time
import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from megavis.model.kernels import choose_kernels, compiles_blocks

BACKEND: dict[str, Any] = {"backend": "inductor", "options": {"fallback_random": True}}
"""Arguments of `torch.compile`."""


@dataclass
class Compilation:
    """What compiling blocks took in this process.

    Attributes:
        graphs: number of graphs, forward and backward pass counted as one.
        seconds: in which forward passes were compiled and ran first; torch compiles a backward pass
            when it first runs.
        failure: why a block could not be compiled; None if all could.
    """

    graphs: int = 0
    seconds: float = 0.0
    failure: str | None = None


def take_compilation() -> Compilation:
    """Return what compiling took since the last call, and count anew."""
    taken, _Process.compilation = _Process.compilation, Compilation()
    return taken


class _Process:
    """Of this process, like the setting of `choose_kernels`."""

    compilation = Compilation()


class CompiledBlocks:
    """The graphs of a stack's blocks."""

    def __init__(self) -> None:
        self._compiled: Callable[..., Tensor] | None = None
        self._known: set[tuple[Any, ...]] = set()

    def __call__(
        self, plain: Callable[..., Tensor], key: object, hidden: Tensor, *inputs: Any
    ) -> Tensor:
        """Return `plain(hidden, *inputs)`, by a graph if blocks are compiled.

        Args:
            plain: a block's own routine.
            key: what else makes the graph another one.
        """
        if not compiles_blocks(hidden.device):
            return plain(hidden, *inputs)
        if self._compiled is None:
            self._compiled = torch.compile(
                _own(cast(types.FunctionType, _call)), fullgraph=True, dynamic=False, **BACKEND
            )
        began = time.perf_counter()
        try:
            result = self._compiled(plain, hidden, *inputs)
        except torch.OutOfMemoryError:
            raise
        # Dynamo, Inductor, Triton and the compiler raise what they like; what is wrong with the
        # block itself is raised again.
        except Exception as error:
            _Process.compilation.failure = _summary(error)
            choose_kernels("regions")
            return plain(hidden, *inputs)
        # What Dynamo guards on: each combination is another graph, also the first pass of a
        # checkpoint, which has no gradients.
        kind = (key, hidden.shape, hidden.requires_grad, torch.is_grad_enabled())
        if kind not in self._known:
            self._known.add(kind)
            _Process.compilation.graphs += 1
            _Process.compilation.seconds += time.perf_counter() - began
        return result


def _summary(error: Exception) -> str:
    """Return the error in one line; the first may only say which backend raised it."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {' '.join(lines[:2])}"


def _call(plain: Callable[..., Tensor], hidden: Tensor, *inputs: Any) -> Tensor:
    return plain(hidden, *inputs)


def _own(function: types.FunctionType) -> types.FunctionType:
    """Return the function with code of its own, since torch keeps only some graphs of each code."""
    return types.FunctionType(function.__code__.replace(), function.__globals__)
