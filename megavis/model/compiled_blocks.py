"""Blocks compiled whole: `torch.compile` makes one graph of each Transformer block in training.

A graph's inputs are the hidden states, the attention context and the block's parameters. Since
parameters are inputs rather than constants, all blocks of a stack share one graph, except the last,
which may compute fewer tokens. Values computed once per step (`Attention.prepared`) and drop path's
draws are inputs too, and recomputing a whole block runs the graph again.

Inductor draws dropout as torch does (`fallback_random`), so masks do not depend on whether blocks
are compiled. Norms and activation functions are recomputed in the backward pass where the compiler
finds that cheaper than saving them.

Graphs of both passes are compiled on first use, in the first step. If that fails, the process
continues with `training.kernels: regions`; `training/callbacks/compilation.py` reports either
outcome.
"""

from __future__ import annotations

import contextlib
import time
import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor
from torch._functorch import config as functorch

from megavis.model.kernels import choose_kernels, compiles_blocks

BACKEND: dict[str, Any] = {"backend": "inductor", "options": {"fallback_random": True}}
"""Arguments of `torch.compile`."""
_NOTHING = contextlib.nullcontext()


@dataclass
class Compilation:
    """Statistics of compiling blocks in this process.

    Attributes:
        graphs: number of graphs, forward and backward pass counted as one.
        seconds: time of the first calls, which compile both passes; torch 2.11 compiles a backward
            pass when it first runs.
        failure: why a block could not be compiled; None if all could.
    """

    graphs: int = 0
    seconds: float = 0.0
    failure: str | None = None


def take_compilation() -> Compilation:
    """Return the statistics since the last call, and reset them."""
    taken, _Process.compilation = _Process.compilation, Compilation()
    return taken


class _Process:
    """Process-wide state, like the setting of `choose_kernels`."""

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
            key: whatever else distinguishes graphs.
        """
        if not compiles_blocks(hidden.device):
            return plain(hidden, *inputs)
        if self._compiled is None:
            self._compiled = torch.compile(
                _own(cast(types.FunctionType, _call)), fullgraph=True, dynamic=False, **BACKEND
            )
        # Dynamo guards on these: each combination is a separate graph, including the first pass of
        # a checkpointed block, which has no gradients.
        kind = (key, hidden.shape, hidden.requires_grad, torch.is_grad_enabled())
        is_new = kind not in self._known
        began = time.perf_counter()
        try:
            # With the forward pass, since an error in the backward pass would end the run.
            with functorch.patch(force_non_lazy_backward_lowering=True) if is_new else _NOTHING:
                result = self._compiled(plain, hidden, *inputs)
        except torch.OutOfMemoryError:
            raise
        # Dynamo, Inductor, Triton and the compiler may raise any exception. A fault of the block
        # itself is raised again by the plain call.
        except Exception as error:
            _Process.compilation.failure = _summary(error)
            choose_kernels("regions")
            return plain(hidden, *inputs)
        if is_new:
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
    """Copy the function's code object, since torch limits the number of graphs of each."""
    return types.FunctionType(function.__code__.replace(), function.__globals__)
