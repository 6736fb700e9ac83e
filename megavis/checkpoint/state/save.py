"""Write checkpoints: of a run, for another layout, or of imported weights.

In a run, every process writes the slices that it owns; beyond its own share, it gathers only one
parameter at a time. Any layout can load any checkpoint without conversion. After conversion to its
layout, each process reads only whole files, which is faster on network file systems. Conversion and
import need neither a model nor a job.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from threading import Thread
from typing import Any

import torch
from torch import Tensor, nn

from megavis.checkpoint.format.folder import partial_folder, publish, step_folder
from megavis.checkpoint.format.manifest import (
    CHECKSUMS,
    CheckpointManifest,
    LogicalTensor,
    LossHistory,
    LossScale,
    StoredFile,
    TensorKind,
    TensorSlice,
    file_damage,
    read_manifest,
    write_manifest,
)
from megavis.checkpoint.format.tensor_files import open_tensors, save_tensors
from megavis.checkpoint.format.tensor_reader import CheckpointReader
from megavis.checkpoint.state.parameter_states import ParameterStates, logical_shape
from megavis.config.errors import UserError
from megavis.data.format.files import flush_folder, make_within, sha256_of_file
from megavis.model.parameters import is_first_copy, partition_dimension
from megavis.parallel.context import ParallelContext
from megavis.parallel.progress_bar import shown


@dataclass(frozen=True)
class TrainingProgress:
    """A run's progress in a manifest; with the seed, it determines all later steps."""

    step: int
    samples_seen: int
    seed: int
    tokenizer: str | None
    data: str | None = None
    classes: tuple[str, ...] = ()
    words: Mapping[str, Any] | None = None
    origin: str | None = None
    loss_scale: LossScale | None = None
    batches_skipped: int = 0
    losses: LossHistory = LossHistory()


class HostCopies:
    """Host memory for the copies of a snapshot, by name, kept from one save to the next.

    The system allocates new memory page by page, on the first write: on a machine with an H100,
    8.3 GB took 5.5 s to copy into new memory, and 0.6 s into memory that had been written before.
    Training waits for a snapshot, so a thread writes to the memory once, before the first snapshot.

    Args:
        keeps: keep the memory of each copy for the next copy of that name, which overwrites it.
    """

    def __init__(self, *, keeps: bool) -> None:
        self.keeps = keeps
        self._kept: dict[str, Tensor] = {}
        self._thread: Thread | None = None

    def reserve(self, shapes: Mapping[str, torch.Size]) -> None:
        """Allocate memory for float32 tensors in a thread, if it is kept and not allocated yet."""
        if self.keeps and self._thread is None and not self._kept:
            self._thread = Thread(
                target=self._touch, args=(dict(shapes),), name="host memory", daemon=True
            )
            self._thread.start()

    def wait(self) -> None:
        """Wait until the memory is ready."""
        if self._thread is not None:
            self._thread.join()

    def copy(self, name: str, value: Tensor) -> Tensor:
        """Return a contiguous copy of a tensor in host memory."""
        if not self.keeps:
            return value.detach().to("cpu", copy=True).contiguous()
        self.wait()
        kept = self._kept.get(name)
        if kept is None or (kept.shape, kept.dtype) != (value.shape, value.dtype):
            kept = self._kept[name] = torch.empty(value.shape, dtype=value.dtype)
        return kept.copy_(value.detach())

    def _touch(self, shapes: Mapping[str, torch.Size]) -> None:
        for name, shape in shapes.items():
            # Fill explicitly, since the system provides zeros without touching the pages.
            self._kept[name] = torch.zeros(shape).fill_(0)


class Snapshot:
    """A checkpoint in this process's memory, with the tensors that it owns.

    `write` may run in a thread while training continues; then every process calls `publish`, before
    the next snapshot with the same `copies` is made. Creation is collective over all processes.
    """

    def __init__(
        self,
        run_folder: Path,
        progress: TrainingProgress,
        states: ParameterStates,
        copies: HostCopies | None = None,
    ) -> None:
        self.step, context = progress.step, states.context
        self._run_folder, self._progress, self._context = run_folder, progress, context
        self._partial = partial_folder(run_folder, progress.step)
        if context.is_main:
            shutil.rmtree(self._partial, ignore_errors=True)
        self._file = f"rank-{context.world.rank:05d}.safetensors"
        copies = copies or HostCopies(keeps=False)
        self._tensors, self._entries = _collect(self._file, states, copies)
        self._optimizer_step = states.optimizer_step()
        self._stored: StoredFile | None = None
        # Assume failure until the writer succeeds: a thread may die without an exception.
        self._failure = f"{self._partial / self._file}: the writer thread has died"
        # Wait until the main process has removed the old folder.
        context.barrier()

    def write(self) -> None:
        """Write this process's share; `publish` reports failures on all processes."""
        path = self._partial / self._file
        try:
            make_within(self._run_folder, *self._partial.relative_to(self._run_folder).parts)
            if self._tensors:
                self._stored = write_tensors(path, self._tensors)
            self._failure = ""
        # Any exception: one raised in a thread would not reach the caller.
        except Exception as error:
            self._failure = f"{path}: {error}"
        # Free the copies, which are as large as this process's share of weights and states.
        self._tensors.clear()

    def publish(self) -> None:
        """Publish the checkpoint atomically. Collective over all processes.

        Raises OSError on every process if any process could not write.
        """
        mine = (self._file, self._stored, self._entries, self._failure)
        gathered = self._context.gather(mine)
        failure = next((failure for *_, failure in gathered if failure), "")
        if not failure:
            try:
                self._context.on_main(lambda: self._finish(gathered))
            except OSError as error:
                failure = str(error)
        if failure:
            if self._context.is_main:
                shutil.rmtree(self._partial, ignore_errors=True)
            raise OSError(f"checkpoint of step {self.step} not saved: {failure}")

    def _finish(self, gathered: list) -> None:
        manifest = CheckpointManifest(
            **vars(self._progress),
            optimizer_step=self._optimizer_step,
            layout=_layout(self._context),
            files={file: stored for file, stored, *_ in gathered if stored is not None},
            tensors=_join([entries for _, _, entries, _ in gathered]),
        )
        write_manifest(self._partial, manifest)
        publish(self._run_folder, self.step)


def _collect(
    file: str, states: ParameterStates, copies: HostCopies
) -> tuple[dict[str, Tensor], dict[str, LogicalTensor]]:
    """Return the slices that this process writes, and their entries in the manifest."""
    context = states.context
    tensors: dict[str, Tensor] = {}
    entries: dict[str, LogicalTensor] = {}

    def add(key: str, value: Tensor, dimension: int | None) -> None:
        entries[key] = _entry(value, dimension, file, key, context)
        tensors[key] = copies.copy(key, value)

    for key, parameter, kind, is_mine in _states_of(states):
        # On every process, including those that do not write it: gathering is collective.
        value = states.get(parameter, kind)
        if is_mine:
            add(key, value, partition_dimension(parameter))
    for name, buffer in states.layers.named_buffers():
        if context.replicas.rank == 0 and context.tensor.rank == 0:
            add(f"weight/{name}", buffer.float(), None)
    return tensors, entries


def _states_of(states: ParameterStates) -> Iterator[tuple[str, nn.Parameter, TensorKind, bool]]:
    """Yield key, parameter and kind of each state, and whether this process writes it."""
    replicas = states.context.replicas
    load = [0] * replicas.size
    for name, parameter in states.layers.named_parameters():
        for kind in states.kinds(parameter):
            # Choose the replica with the least to write so far: all ranks agree without
            # communication, and none exceeds an equal share by more than one tensor.
            owner = load.index(min(load))
            load[owner] += logical_shape(parameter).numel()
            is_mine = owner == replicas.rank and is_first_copy(parameter)
            yield f"{kind}/{name}", parameter, kind, is_mine


def reserve_copies(copies: HostCopies, states: ParameterStates) -> None:
    """Make host memory ready for the snapshots of a run; once the optimizer has its states."""
    owned = ((key, parameter) for key, parameter, _, is_mine in _states_of(states) if is_mine)
    copies.reserve({key: logical_shape(parameter) for key, parameter in owned})


def _entry(
    value: Tensor, dimension: int | None, file: str, key: str, context: ParallelContext
) -> LogicalTensor:
    if dimension is None:
        return LogicalTensor.whole(value.shape, file, key)
    shape = list(value.shape)
    length = shape[dimension]
    shape[dimension] = length * context.tensor.size
    piece = TensorSlice(file=file, key=key, start=length * context.tensor.rank, length=length)
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
    """Write a safetensors file, flush it, read it back, and return its size and hash.

    The header has a CRC-32 of each tensor, to find the damaged one in a damaged file. Raises
    OSError or UserError if the file cannot be written, or not be read back as written.
    """
    checksums = {key: _checksum(tensor) for key, tensor in tensors.items()}
    # In one metadata entry: safetensors writes several in varying order, and equal tensors must
    # give equal files.
    save_tensors(path, tensors, {CHECKSUMS: json.dumps(checksums)})
    # Reopen the file, since safetensors does not expose its descriptor: any descriptor flushes it.
    with path.open("rb") as file:
        os.fsync(file.fileno())
    flush_folder(path.parent)
    # A network disk over quota may only report an error on close, which safetensors ignores; size
    # and hash would then describe the truncated file.
    with open_tensors(path) as file:
        for key, checksum in checksums.items():
            if _checksum(file.get_tensor(key)) != checksum:
                raise OSError(f"{key} cannot be read back as it was written")
    return StoredFile(size=path.stat().st_size, sha256=sha256_of_file(path))


def _checksum(tensor: Tensor) -> int:
    return zlib.crc32(tensor.detach().numpy().data)


def _layout(context: ParallelContext) -> dict[str, int]:
    return {
        "tensor_model_parallel_size": context.tensor.size,
        "context_parallel_size": context.context.size,
        "pipeline_model_parallel_size": context.pipeline.size,
        "data_parallel_size": context.data.size,
    }


def convert(source: Path, run_folder: Path, *, tensor_size: int, data_size: int) -> Path:
    """Rewrite a checkpoint into another run folder, with one file in memory at a time.

    Args:
        source: checkpoint of one step.
        run_folder: target run folder, without a checkpoint of that step.
        tensor_size: tensor-parallel size of the target layout.
        data_size: data-parallel size of the target layout; tensors are spread over its processes.

    Raises:
        OSError, UserError: the target exists or cannot be written, a file of the source is damaged,
            or a tensor is not divisible.
    """
    manifest = read_manifest(source)
    target = step_folder(run_folder, manifest.step)
    partial = partial_folder(run_folder, manifest.step)
    if target.exists():
        raise UserError(f"{target}: exists; choose another folder")
    # Before creating the folder, so that nothing is left behind if a tensor is not divisible.
    entries = _cut(manifest.tensors, tensor_size, data_size)
    for name, stored in manifest.files.items():
        # The new checksums would be those of the damaged content.
        if damage := file_damage(source / name, stored):
            raise UserError(damage)
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    names = sorted({piece.file for entry in entries.values() for piece in entry.slices})
    with CheckpointReader(source) as reader:
        files = {
            name: write_tensors(partial / name, dict(_of_file(reader, entries, name)))
            for name in shown(names, "files", total=len(names), unit="file")
        }
    layout = {
        "tensor_model_parallel_size": tensor_size,
        "context_parallel_size": 1,
        "pipeline_model_parallel_size": 1,
        "data_parallel_size": data_size,
    }
    changed = manifest.model_copy(update={"layout": layout, "files": files, "tensors": entries})
    write_manifest(partial, changed)
    return publish(run_folder, manifest.step, keeps_newer=True)


def _cut(
    tensors: dict[str, LogicalTensor], tensor_size: int, data_size: int
) -> dict[str, LogicalTensor]:
    """Return each tensor with the slices of the target layout."""
    load = [0] * data_size
    entries = {}
    for key, entry in tensors.items():
        owner = load.index(min(load))
        load[owner] += math.prod(entry.shape)
        parts = 1 if entry.dimension is None else tensor_size
        length = entry.shape[entry.dimension or 0] if entry.shape else 1
        if length % parts:
            raise UserError(f"{key}: {length} rows are not divisible by tensor size {parts}")
        slices = tuple(
            TensorSlice(
                file=f"rank-{owner * tensor_size + part:05d}.safetensors",
                key=key,
                start=part * (length // parts),
                length=length // parts,
            )
            for part in range(parts)
        )
        entries[key] = entry.model_copy(update={"slices": slices})
    return entries


def _of_file(
    reader: CheckpointReader, entries: dict[str, LogicalTensor], name: str
) -> Iterator[tuple[str, Tensor]]:
    """Yield the slices stored in one file."""
    for key, entry in entries.items():
        for piece in entry.slices:
            if piece.file != name:
                continue
            if len(entry.slices) == 1:
                yield key, reader.read(key)
            else:
                part = reader.read(key, piece.start, piece.length, dimension=entry.dimension)
                yield key, part.contiguous()


def write_weights(
    run_folder: Path,
    weights: Mapping[str, Tensor],
    *,
    seed: int,
    tokenizer: str | None,
    classes: tuple[str, ...] = (),
    trained: tuple[int, int] = (0, 0),
    words: Mapping[str, Any] | None = None,
    origin: str | None = None,
) -> Path:
    """Write a checkpoint with float32 weights only, without optimizer states.

    The run must have no checkpoint of that step.

    Args:
        run_folder: the run.
        weights: by parameter name.
        seed: of the run.
        tokenizer: SHA-256 of its palette or tokenizer, if any.
        classes: names, by label, of the classes that it reads or predicts, if known.
        trained: steps and images that it was trained for.
        words: of its paper.
        origin: where imported weights came from.
    """
    (step, samples), name = trained, "weights.safetensors"
    partial = partial_folder(run_folder, step)
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    keyed = {f"weight/{key}": tensor for key, tensor in weights.items()}
    stored = write_tensors(partial / name, keyed)
    manifest = CheckpointManifest(
        step=step,
        samples_seen=samples,
        optimizer_step=0,
        seed=seed,
        tokenizer=tokenizer,
        classes=classes,
        words=words,
        origin=origin,
        layout={},
        files={name: stored},
        tensors={key: LogicalTensor.whole(t.shape, name, key) for key, t in sorted(keyed.items())},
    )
    write_manifest(partial, manifest)
    return publish(run_folder, step)
