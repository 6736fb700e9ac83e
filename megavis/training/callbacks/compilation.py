"""A report of the blocks that were compiled, after the first step."""

from __future__ import annotations

import os
import sys
import time
from dataclasses import dataclass, field

from megavis.config.errors import counted
from megavis.model.compiled_blocks import Compilation, take_compilation
from megavis.model.kernels import choose_kernels
from megavis.parallel.context import ParallelContext
from megavis.training.callbacks.callback import StepState


@dataclass
class ReportCompilation:
    """Reports once what the first step compiled; if one process could not, none uses the graphs.

    For runs whose blocks are compiled (`compiles_blocks`), on all processes. The time reported is
    that of the whole step, since torch 2.11 compiles the backward pass lazily, inside autograd.
    """

    context: ParallelContext
    is_done: bool = False
    began: float = field(default_factory=time.perf_counter)

    def __call__(self, state: StepState) -> None:
        """Compare all processes after the first step; the main one writes a line."""
        if state.loss is None:
            return
        if self.is_done:
            self._report_later(state.step)
            return
        self.is_done = True
        found = self.context.gather(take_compilation())
        failures = [each.failure for each in found if each.failure is not None]
        if failures:
            choose_kernels("regions")
        if self.context.is_main:
            sys.stderr.write(_line(found, failures, time.perf_counter() - self.began))

    def _report_later(self, step: int) -> None:
        """Warn if this process has since changed kernels, which barely changes results."""
        failure = take_compilation().failure
        if failure is not None:
            rank = self.context.world.rank
            sys.stderr.write(
                f"WARNING: step {step}: process {rank} no longer runs compiled blocks: {failure}\n"
            )


def _line(found: list[Compilation], failures: list[str], seconds: float) -> str:
    if failures:
        return (
            f"WARNING: {len(failures)} of {len(found)} processes could not compile whole blocks:"
            f" {failures[0]}; blocks run uncompiled, which is slower (training.kernels: regions)\n"
        )
    most = max(each.graphs for each in found)
    if not most:
        return ""
    # torch sets the variable when it compiles.
    kept = os.environ.get("TORCHINDUCTOR_CACHE_DIR")
    kept = "" if kept is None else f", kept in {kept}"
    return f"first step in {seconds:.1f} s: blocks compiled, {counted(most, 'graph')}{kept}\n"
