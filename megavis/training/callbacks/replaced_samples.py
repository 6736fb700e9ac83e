"""Report samples that could not be read: name each once, and count them in the metrics.

`ShardDataset` reads the next good sample in place of a bad one, so that one broken image does not
end a run of a month; the report keeps this from going unnoticed.
"""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist
from tqdm import tqdm

from megavis.data.loading.blended_dataset import Samples
from megavis.parallel.context import ParallelContext
from megavis.training.callbacks.base import StepState

_MAX_NAMED = 20
"""Names that a process prints; further ones are only counted."""


class ReportReplacedSamples:
    """Name new ones on stderr and record `samples_replaced`, every N steps.

    Batches are read ahead, so that a sample may be named before the step that would have had it.
    """

    def __init__(self, every: int, data: Samples, context: ParallelContext) -> None:
        self.every, self.data, self.context = every, data, context
        # What the index shows, every process knows from the start.
        self._known = len(data.skipped_names)
        self._named: set[str] = set() if context.is_main else set(data.skipped_names)

    def __call__(self, state: StepState) -> None:
        """Every process takes part."""
        if not state.is_due(self.every):
            return
        names = self.data.skipped_names
        self._report([name for name in names if name not in self._named])
        met = torch.tensor(len(names) - self._known, device=self.context.device)
        dist.all_reduce(met, group=self.context.data.group)
        if total := self._known + int(met):
            state.record["samples_replaced"] = total

    def _report(self, names: list[str]) -> None:
        room = max(0, _MAX_NAMED - len(self._named))
        for name in names[:room]:
            tqdm.write(f"data: {name}; the next good sample is read in its place", sys.stderr)
        if 0 < room < len(names):
            tqdm.write("data: further samples are counted, not named", sys.stderr)
        self._named.update(names)
