"""Writing a checkpoint: every process writes the slices that it owns.

Each process keeps, besides its own share, one parameter at a time.
"""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass, field
from pathlib import Path

import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor

from megavis.checkpoint.folder import partial_folder, publish
from megavis.checkpoint.manifest import (
    KINDS,
    MANIFEST,
    LogicalTensor,
    LossScale,
    Manifest,
    Slice,
    StoredFile,
)
from megavis.checkpoint.state import ParameterStates, logical_shape
from megavis.data.files import flush_folder, sha256_of_file, write_atomically
from megavis.model.stack import LocalLayers
from megavis.parallel.context import ParallelContext
from megavis.parallel.tensors import is_first_copy, partition_dimension


@dataclass(frozen=True)
class Progress:
    """Where the run stands; with the seed it decides all that comes."""

    step: int
    samples_seen: int
    seed: int
    tokenizer: str | None
    loss_scale: LossScale | None = None


@dataclass
class _Share:
    """What one process writes."""

    tensors: dict[str, Tensor] = field(default_factory=dict)
    entries: dict[str, LogicalTensor] = field(default_factory=dict)


def save_checkpoint(
    run_folder: Path,
    progress: Progress,
    *,
    layers: LocalLayers,
    states: ParameterStates,
    context: ParallelContext,
) -> Path:
    """Save; every process calls this. The checkpoint appears completely or not at all.

    Raises:
        OSError: on every process when any of them could not write.
    """
    partial = partial_folder(run_folder, progress.step)
    if context.is_main:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
    dist.barrier(group=context.world.group)
    name = f"rank-{context.world.rank:05d}.safetensors"
    share = _collect(name, layers, states, context)
    written: tuple[StoredFile | None, str] = (None, "")
    try:
        if share.tensors:
            written = (write_tensors(partial / name, share.tensors), "")
    except OSError as error:
        written = (None, f"{partial / name}: {error}")
    gathered: list = [None] * context.world.size
    dist.all_gather_object(gathered, (name, written, share.entries))
    failures = [text for _, (_, text), _ in gathered if text]
    if failures:
        raise OSError(f"checkpoint of step {progress.step} not saved: {failures[0]}")
    optimizer_step = states.optimizer_step()
    if context.is_main:
        files = {file: stored for file, (stored, _), _ in gathered if stored is not None}
        manifest = Manifest(
            step=progress.step,
            samples_seen=progress.samples_seen,
            optimizer_step=optimizer_step,
            loss_scale=progress.loss_scale,
            seed=progress.seed,
            tokenizer=progress.tokenizer,
            layout=_layout(context),
            files=files,
            tensors=_join([entries for _, _, entries in gathered]),
        )
        write_atomically(partial / MANIFEST, manifest.model_dump_json().encode())
        publish(run_folder, progress.step)
    dist.barrier(group=context.world.group)
    return run_folder / "checkpoints" / f"step-{progress.step:08d}"


def _collect(
    file: str, layers: LocalLayers, states: ParameterStates, context: ParallelContext
) -> _Share:
    share = _Share()
    load = [0] * context.data.size
    for name, parameter in layers.named_parameters():
        # The data-parallel rank with the least to write so far; all ranks agree without talking.
        owner = load.index(min(load))
        load[owner] += logical_shape(parameter).numel()
        for kind in KINDS:
            value = states.get(parameter, kind)
            if owner != context.data.rank or not is_first_copy(parameter):
                continue
            dimension = partition_dimension(parameter)
            key = f"{kind}/{name}"
            entry = _entry(value, dimension, file, key, context)
            share.entries[key] = entry
            share.tensors[key] = value.detach().to("cpu", copy=True).contiguous()
    return share


def _entry(
    value: Tensor, dimension: int | None, file: str, key: str, context: ParallelContext
) -> LogicalTensor:
    shape = list(value.shape)
    if dimension is None:
        piece = Slice(file=file, key=key, start=0, length=shape[0] if shape else 1)
        return LogicalTensor(shape=tuple(shape), dimension=None, slices=(piece,))
    length = shape[dimension]
    shape[dimension] = length * context.tensor.size
    piece = Slice(file=file, key=key, start=length * context.tensor.rank, length=length)
    return LogicalTensor(shape=tuple(shape), dimension=dimension, slices=(piece,))


def _join(shares: list[dict[str, LogicalTensor]]) -> dict[str, LogicalTensor]:
    whole: dict[str, LogicalTensor] = {}
    for entries in shares:
        for key, entry in entries.items():
            slices = (*whole[key].slices, *entry.slices) if key in whole else entry.slices
            ordered = tuple(sorted(slices, key=lambda piece: piece.start))
            whole[key] = entry.model_copy(update={"slices": ordered})
    return dict(sorted(whole.items()))


def write_tensors(path: Path, tensors: dict[str, Tensor]) -> StoredFile:
    """Write a safetensors file, flush it, and return its size and hash."""
    save_file(tensors, path)
    with path.open("rb") as file:
        os.fsync(file.fileno())
    flush_folder(path.parent)
    return StoredFile(size=path.stat().st_size, sha256=sha256_of_file(path))


def _layout(context: ParallelContext) -> dict[str, int]:
    return {
        "tensor_model_parallel_size": context.tensor.size,
        "pipeline_model_parallel_size": context.pipeline.size,
        "data_parallel_size": context.data.size,
    }
