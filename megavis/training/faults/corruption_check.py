"""Detect silent data corruption: flipped bits in memory, and wrong results of a processor.

Replicas must hold identical bits, and the same images must give the same loss on every replica and
twice on one. Two exceptions to bitwise equality: NCCL may sum in another order in another tensor
group (`allowed_difference`), and GPU kernels may be nondeterministic (`_repeats`).
"""

from __future__ import annotations

import contextlib
import math
import os
import socket
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from megavis.config.errors import CORRUPTION_EXIT_CODE, CorruptionError
from megavis.config.schema import CheckpointConfig
from megavis.data.loading.blended_dataset import Samples
from megavis.data.loading.loader import Batch, read_batch
from megavis.model.inference import Inference
from megavis.model.kernels import plain_kernels
from megavis.model.parameters import partition_dimension
from megavis.training.callbacks.callback import StepState
from megavis.training.engine import Engine
from megavis.training.provenance import record_fault

Fingerprints = dict[str, int]
"""Checksums by key: processes with the same key must have the same number."""


FAULTY_NODES = "MEGAVIS_FAULTY_NODES"
"""Environment variable: a file to which to write the nodes that the launcher should exclude."""

# Elements per chunk: 32 MB as int64.
_PIECE = 1 << 22
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class CheckReplicas:
    """End training if processes disagree; a check also precedes every checkpoint.

    The check is on training images, in the order of `seed` with `batches_skipped` batches skipped.
    """

    def __init__(
        self,
        every: int,
        saving: CheckpointConfig,
        samples: Samples,
        *,
        seed: int,
        batches_skipped: int,
    ) -> None:
        self.every, self.saving, self.samples = every, saving, samples
        self._order, self._batches_skipped = samples.order(seed), batches_skipped

    def __call__(self, state: StepState) -> None:
        """Check if due.

        Raises CorruptionError on every process, naming what differs, the ranks and their hosts.
        """
        due = state.is_due(self.every) or state.needs_checkpoint(self.saving)
        if state.loss is None or state.rolls_back or not (due or state.is_last):
            return
        engine, world = state.engine, state.engine.context.world
        mine = (
            f"rank {world.rank} on {socket.gethostname()}",
            weight_fingerprints(engine),
            self.losses(engine, state.step),
            os.environ.get("SLURMD_NODENAME", socket.gethostname()),
        )
        all_found = engine.context.gather(mine)
        found = disagreement({rank: prints for rank, prints, *_ in all_found})
        if not found.text:
            losses = {rank: losses for rank, _, losses, _ in all_found}
            found = loss_disagreement(losses, allowed_difference(engine))
        if found.text:
            nodes = {node for rank, *_, node in all_found if rank in found.wrong}
            _remember(engine, state.step, found.text, nodes)
            raise CorruptionError(
                f"after step {state.step}, {found.text}; it is not saved: exclude that host"
                " and start the run again"
            )

    def losses(self, engine: Engine, step: int) -> Losses:
        """Return the loss of one micro-batch, computed twice."""
        batch = self._first_micro_batch(engine, step).to(engine.context.device)
        inference = Inference(engine.layers, engine.context)
        losses = []
        # Each process chooses the tiles of a generated kernel by its own timings, and other tiles
        # add in another order.
        with plain_kernels():
            for _ in range(2):
                sequence = engine.objective.sequence(batch)
                predictions = inference.predictions(sequence.inputs)
                with torch.no_grad():
                    losses.append(engine.objective.loss(predictions, sequence.targets).float())
        first, second = torch.stack(losses).tolist()
        # Processes with different parts of the model may round differently.
        return Losses(engine.context.model.rank, first, second)

    def _first_micro_batch(self, engine: Engine, step: int) -> Batch:
        """Read the first micro-batch of data-parallel rank 0, on every rank."""
        first = (step - 1 + self._batches_skipped) * engine.config.training.batch_size
        positions = np.arange(first, first + engine.micro_batch_size, dtype=np.int64)
        return read_batch(self.samples, self._order.dataset_index(positions), positions)


@dataclass(frozen=True)
class Losses:
    """Losses of two passes over the same images on one process, which has a part of the model."""

    part: int
    first: float
    second: float


def allowed_difference(engine: Engine) -> float:
    """Return the allowed difference of losses on the same images, relative to 1 or the larger one.

    0 if NCCL computes no sums, since all processes use torch's own kernels. Otherwise the rounding
    error of one number in the compute precision, far below the effect of a wrong result.
    """
    context = engine.context
    if context.device.type == "cpu" or context.tensor.size == 1:
        return 0.0
    return {"float32": 1e-5, "bf16": 2.0**-8, "fp16": 2.0**-11}[engine.config.training.precision]


def _remember(engine: Engine, step: int, complaint: str, nodes: Iterable[str]) -> None:
    """Record the fault in the run folder, and the faulty nodes for the launcher, if it asks.

    Called on every process.
    """
    if engine.context.is_main:
        # A full disk must not hide the fault.
        with contextlib.suppress(OSError):
            folder = engine.config.folder
            record_fault(folder, step, complaint, exit_code=CORRUPTION_EXIT_CODE)
        with contextlib.suppress(OSError):
            if (path := os.environ.get(FAULTY_NODES)) is not None:
                lines = "".join(f"{node}\n" for node in sorted(nodes))
                Path(path).write_text(lines, encoding="utf-8")
    # The first process to exit may end the others.
    engine.context.barrier()


def weight_fingerprints(engine: Engine) -> Fingerprints:
    """Return a checksum of each tensor that other processes hold copies of.

    Under ZeRO 0 to 2 that is every weight, under ZeRO-0 also moments and average. Under ZeRO-3
    only this process's share of tensors that tensor parallelism replicates, such as norms, where
    processes of a tensor group compute the same bits.
    """
    tensors = dict(_replicated(engine))
    if not tensors:
        return {}
    sums = torch.stack([checksum(tensor) for tensor in tensors.values()])
    return dict(zip(tensors, sums.tolist(), strict=True))


def _replicated(engine: Engine) -> Iterator[tuple[str, Tensor]]:
    context, zero_stage = engine.context, engine.config.parallel.zero_stage
    for name, parameter in engine.layers.named_parameters():
        is_shared = partition_dimension(parameter) is None and _repeats(engine)
        suffix = "" if is_shared else f" (part {context.tensor.rank})"
        if zero_stage == 3:
            if is_shared:
                # ZeRO-3's share of a partitioned weight.
                share: Tensor = parameter.ds_tensor  # type: ignore[attr-defined]
                yield f"{name} (share {context.replicas.rank})", share
            continue
        yield f"{name}{suffix}", parameter
        if zero_stage == 0:
            for kind in engine.states.kinds(parameter)[1:]:
                yield f"{kind} of {name}{suffix}", engine.states.get(parameter, kind)


def _repeats(engine: Engine) -> bool:
    """Whether processes of a tensor group get the same bits from the same computation.

    They do not exchange gradients of replicated tensors: each computes its own,
    on a GPU with kernels that may add in any order.
    """
    context = engine.context
    is_exact = context.device.type == "cpu" or engine.config.training.deterministic
    return is_exact or context.tensor.size == 1


def checksum(tensor: Tensor) -> Tensor:
    """Return a checksum, int64 on the tensor's device, that detects any single changed element.

    Each element's bits are multiplied by an odd number from its index, and summed modulo 2^64.
    """
    flat = tensor.detach().reshape(-1)
    # Bits, not numbers: 0 equals -0, and NaN differs from itself.
    bits = flat.view(_INTEGERS[flat.element_size()])
    total = torch.zeros((), dtype=torch.int64, device=flat.device)
    for start in range(0, len(bits), _PIECE):
        piece = bits[start : start + _PIECE].long()
        places = torch.arange(start, start + len(piece), device=flat.device)
        # Odd numbers have an inverse modulo 2^64, so no change of a single element is multiplied
        # away.
        total += (piece * (2 * places + 1)).sum()
    return total


@dataclass(frozen=True)
class Disagreement:
    """What differs between processes, and on which; the text is empty if nothing does.

    Attributes:
        text: description that names the processes.
        wrong: names of the processes that are known to be wrong.
    """

    text: str = ""
    wrong: frozenset[str] = frozenset()


def loss_disagreement(losses: Mapping[str, Losses], allowed: float) -> Disagreement:
    """Describe losses, by process, that differ by more than `allowed`."""
    torn = [name for name, mine in losses.items() if not _agree(mine.first, mine.second, allowed)]
    if torn:
        text = f"two passes over the same images give two losses on {', '.join(torn)}"
        return Disagreement(text, frozenset(torn))
    kinds: dict[int, list[float]] = defaultdict(list)
    prints: dict[str, Fingerprints] = {}
    for name, mine in losses.items():
        known = kinds[mine.part]
        like = [i for i, other in enumerate(known) if _agree(mine.first, other, allowed)]
        if not like:
            known.append(mine.first)
        number = like[0] if like else len(known) - 1
        prints[name] = {f"the loss in part {mine.part} of the model": number}
    return disagreement(prints)


def _agree(first: float, second: float, allowed: float) -> bool:
    if first == second or (math.isnan(first) and math.isnan(second)):
        return True
    if not (math.isfinite(first) and math.isfinite(second)):
        return False
    return abs(first - second) <= allowed * max(1.0, abs(first), abs(second))


def disagreement(prints: Mapping[str, Fingerprints]) -> Disagreement:
    """Describe differences between processes, by name.

    If a majority agrees, the others are wrong.
    """
    holders: dict[str, dict[int, list[str]]] = defaultdict(lambda: defaultdict(list))
    for name, mine in prints.items():
        for key, number in mine.items():
            holders[key][number].append(name)
    for key, groups in holders.items():
        if len(groups) == 1:
            continue
        sizes = sorted((len(names) for names in groups.values()), reverse=True)
        if sizes[0] == sizes[1]:
            text = f"{key} differs between {_listed(groups.values())}: which is right is unknown"
            return Disagreement(text)
        wrong = [names for names in groups.values() if len(names) < sizes[0]]
        text = f"{key} on {_listed(wrong)} differs from {sizes[0]} others"
        return Disagreement(text, frozenset(name for names in wrong for name in names))
    return Disagreement()


def _listed(groups: Iterable[Sequence[str]]) -> str:
    return ", ".join(name for names in groups for name in names)
