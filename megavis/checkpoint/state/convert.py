"""Rewrite checkpoints for another layout, and write checkpoints from imported weights.

Any layout can load any checkpoint without conversion; but with slices of its own, each process
reads only whole files, which is faster on network file systems. Neither needs a model or a job.
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path

from torch import Tensor

from megavis.checkpoint.format.folder import partial_folder, publish, step_folder
from megavis.checkpoint.format.manifest import (
    CheckpointManifest,
    LogicalTensor,
    TensorSlice,
    read_manifest,
    write_manifest,
)
from megavis.checkpoint.format.tensor_reader import CheckpointReader
from megavis.checkpoint.state.save import write_tensors
from megavis.config.errors import UserError
from megavis.parallel.progress_bar import shown


def convert(source: Path, run_folder: Path, *, tensor_size: int, data_size: int) -> Path:
    """Rewrite a checkpoint into another run folder, with one file in memory at a time.

    Args:
        source: checkpoint of one step.
        run_folder: target run folder, without a checkpoint of that step.
        tensor_size: tensor-parallel size of the target layout.
        data_size: data-parallel size of the target layout; tensors are spread over its processes.

    Raises:
        UserError: the target exists, or a tensor is not divisible.
    """
    manifest = read_manifest(source)
    target = step_folder(run_folder, manifest.step)
    partial = partial_folder(run_folder, manifest.step)
    if target.exists():
        raise UserError(f"{target}: exists; choose another folder")
    entries = _cut(manifest.tensors, tensor_size, data_size)
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
        "pipeline_model_parallel_size": 1,
        "data_parallel_size": data_size,
    }
    changed = manifest.model_copy(update={"layout": layout, "files": files, "tensors": entries})
    write_manifest(partial, changed)
    return publish(run_folder, manifest.step)


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
    run_folder: Path, weights: Mapping[str, Tensor], *, seed: int, tokenizer: str | None
) -> Path:
    """Write a checkpoint of step 0 with float32 weights only, without optimizer states.

    The run has none of that step; `tokenizer` is the SHA-256 of its palette, if any.
    """
    partial, name = partial_folder(run_folder, 0), "weights.safetensors"
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    keyed = {f"weight/{key}": tensor for key, tensor in weights.items()}
    stored = write_tensors(partial / name, keyed)
    manifest = CheckpointManifest(
        step=0,
        samples_seen=0,
        optimizer_step=0,
        seed=seed,
        tokenizer=tokenizer,
        layout={},
        files={name: stored},
        tensors={key: LogicalTensor.whole(t.shape, name, key) for key, t in sorted(keyed.items())},
    )
    write_manifest(partial, manifest)
    return publish(run_folder, 0)
