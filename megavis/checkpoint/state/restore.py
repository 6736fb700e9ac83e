"""Load a checkpoint into any layout, and find the newest intact one to resume from.

Each process reads only the elements that it holds: under ZeRO, its partition.
"""

from __future__ import annotations

import sys
from collections.abc import Set
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megavis.checkpoint.format.folder import checkpoints_by_age, set_aside
from megavis.checkpoint.format.manifest import CheckpointManifest, file_damage, read_manifest
from megavis.checkpoint.format.tensor_reader import CheckpointReader
from megavis.checkpoint.state.parameter_states import (
    AVERAGE,
    ParameterStates,
    held_elements,
    logical_shape,
    set_held_elements,
)
from megavis.composition.trainable import StartingWeights
from megavis.config.errors import UserError
from megavis.model.parameters import partition_dimension, starts_fresh
from megavis.model.positions import LEARNED, is_grid, resize_table
from megavis.model.stack import LocalLayers
from megavis.parallel.context import ParallelContext


def load_training_state(
    folder: Path, *, layers: LocalLayers, states: ParameterStates, context: ParallelContext
) -> CheckpointManifest:
    """Load weights, moments and step count into a DeepSpeed engine of any layout.

    The files of `folder` must be verified already (`newest_intact_checkpoint`). Raises UserError on
    every process if the model differs.
    """
    with CheckpointReader(folder) as reader:
        averages = states.averages and reader.evaluated == AVERAGE
        # torch creates states in its first step, which is too late to set them.
        states.create_states(reader.manifest.optimizer_step, with_average=averages)
        for name, parameter in layers.named_parameters():
            for kind in states.kinds(parameter):
                held = states.held(parameter, kind)
                values = _elements(reader, f"{kind}/{name}", held, parameter, context)
                states.set_held(parameter, kind, values)
        _fill_buffers(reader, layers)
        return reader.manifest


def start_from_weights(
    folder: Path, *, layers: LocalLayers, states: ParameterStates, context: ParallelContext
) -> None:
    """Load another run's weights into a DeepSpeed engine of any layout, before its first step.

    Parameters that declare so (`Start`) keep their initial weights. Raises UserError on every
    process if a file is damaged or the model differs.
    """
    check_files(folder, context)
    # Buffers keep their initial values: all are batch-norm statistics in the head of a task.
    with CheckpointReader(folder) as reader:
        for name, parameter in layers.named_parameters():
            is_saved = f"weight/{name}" in reader.manifest.tensors
            if not starts_fresh(parameter, is_saved=is_saved):
                held = states.held(parameter, "weight")
                values = _weight(reader, name, held, parameter, context)
                states.set_held(parameter, "weight", values)


def start_encoder(
    pretrained: StartingWeights,
    *,
    layers: LocalLayers,
    states: ParameterStates,
    context: ParallelContext,
) -> None:
    """Load the weights of an encoder into a DeepSpeed engine of any layout, before its first step.

    All other weights keep their initial values. Raises UserError on every process if a file is
    damaged or lacks a tensor.
    """
    check_files(pretrained.checkpoint, context)
    with CheckpointReader(pretrained.checkpoint) as reader:
        for name, parameter in layers.named_parameters():
            whole = pretrained.tensor(reader, name)
            if whole is not None:
                states.set(parameter, "weight", own_slice(whole, parameter, context))


def load_weights(folder: Path, layers: LocalLayers, context: ParallelContext) -> CheckpointManifest:
    """Load the evaluation weights, EMA if there is one, into modules without an engine.

    Learned positions are interpolated to another grid, here and in `start_from_weights`, since
    images may have another size than in training.
    """
    manifest = check_files(folder, context)
    if context.pipeline.size == 1:  # Otherwise other stages have the other layers.
        known = {name for name, _ in (*layers.named_parameters(), *layers.named_buffers())}
        _require_all(folder, manifest, known)
    with CheckpointReader(folder) as reader, torch.no_grad():
        for name, parameter in layers.named_parameters():
            held = held_elements(parameter)
            set_held_elements(parameter, _weight(reader, name, held, parameter, context))
        _fill_buffers(reader, layers)
        return reader.manifest


def _require_all(folder: Path, manifest: CheckpointManifest, known: Set[str]) -> None:
    """Raise UserError if a network lacks a layer that was trained."""
    saved = {key.partition("/")[2] for key in manifest.tensors if key.startswith("weight/")}
    if unused := sorted(saved - known):
        raise UserError(
            f"{folder} holds {unused[0]}, which the network of its run's config.yaml lacks: it was"
            " trained with another config"
        )


def check_files(folder: Path, context: ParallelContext) -> CheckpointManifest:
    """Verify size and SHA-256 of all files; the files are divided among the processes.

    Returns the manifest as the main process reads it. On every process, raises OSError if any
    process cannot read a file, which is then not known to be damaged; otherwise UserError, naming
    the first damaged file.
    """
    # Other nodes may see an outdated folder, and would resume from a different checkpoint.
    manifest = context.on_main(lambda: read_manifest(folder))
    files = sorted(manifest.files.items())
    mine = files[context.world.rank :: context.world.size]
    found = (file_damage(folder / name, stored) for name, stored in mine)
    complaint: str | OSError | None
    try:
        complaint = next((text for text in found if text), None)
    except OSError as error:
        complaint = error
    complaints: list[Any] = [None] * context.world.size
    dist.all_gather_object(complaints, complaint, group=context.world.group)
    # Report read errors first: a file that one process cannot read is not known to be damaged, and
    # must not be set aside.
    for each in sorted(filter(None, complaints), key=lambda each: not isinstance(each, OSError)):
        raise each if isinstance(each, OSError) else UserError(each)
    return manifest


def own_slice(whole: Tensor, parameter: nn.Parameter, context: ParallelContext) -> Tensor:
    """Return this process's slice of a whole tensor; raise ValueError if shapes differ."""
    shape, dimension = logical_shape(parameter), partition_dimension(parameter)
    if dimension is not None:
        length = shape[dimension]
        whole = whole.narrow(dimension, length * context.tensor.rank, length)
    if whole.shape != shape:
        raise ValueError(f"a tensor of {tuple(whole.shape)} for a parameter of {tuple(shape)}")
    return whole.contiguous()


def _fill_buffers(reader: CheckpointReader, layers: LocalLayers) -> None:
    for name, buffer in layers.named_buffers():
        buffer.copy_(reader.read(f"weight/{name}"))


def _weight(
    reader: CheckpointReader,
    name: str,
    elements: range,
    parameter: nn.Parameter,
    context: ParallelContext,
) -> Tensor:
    key = reader.weight_key(name)
    saved, wanted = reader.shape(key), logical_shape(parameter)
    grids = name == LEARNED and saved is not None and all(map(is_grid, (saved[0], wanted[0])))
    if grids and saved != wanted:
        resized = resize_table(reader.read(key), wanted[0])
        return resized.flatten()[elements.start : elements.stop]
    return _elements(reader, key, elements, parameter, context)


def _elements(
    reader: CheckpointReader,
    key: str,
    elements: range,
    parameter: nn.Parameter,
    context: ParallelContext,
) -> Tensor:
    """Return elements, in row-major order, of this process's tensor-parallel slice."""
    if not key.startswith("weight/") and reader.manifest.optimizer_step == 0:
        # No optimizer step has been taken, or the weights were imported without moments.
        return torch.zeros(len(elements))
    shape, dimension = [*logical_shape(parameter)], partition_dimension(parameter)
    start, length = 0, None
    if dimension is not None:
        length = shape[dimension]
        start = length * context.tensor.rank
        shape[dimension] = length * context.tensor.size
    saved = reader.shape(key)
    if saved is not None and [*saved] != shape:
        raise UserError(
            f"{reader.folder}: {key} has shape {tuple(saved)}, and this model needs"
            f" {tuple(shape)}; the run was trained with another config"
        )
    return reader.read_elements(key, elements, start, length, dimension=dimension)


Found = tuple[Path, CheckpointManifest]


def newest_intact_checkpoint(
    run_folder: Path, context: ParallelContext, *, up_to: int | None = None
) -> Found | None:
    """Return the newest intact checkpoint, optionally up to a step; None if there is none.

    Collective over all processes. Newer, damaged checkpoints are reported, renamed and skipped, so
    that the run repeats their steps with the same samples and draws.

    Raises:
        UserError: on every process, if there are checkpoints and all are damaged.
        OSError: likewise, if one cannot be read.
    """
    # The main process decides, since other nodes may see an outdated folder.
    folders = context.on_main(lambda: checkpoints_by_age(run_folder, up_to=up_to))
    damaged_files: list[str] = []
    for folder in folders:
        try:
            manifest = check_files(folder, context)
        except UserError as error:
            damaged_files.append(str(error))
            continue
        if damaged_files and context.is_main:
            set_aside(run_folder, folders[: len(damaged_files)], newest=folder)
            sys.stderr.writelines(f"WARNING: {text}\n" for text in damaged_files)
            sys.stderr.write(f"WARNING: resuming from {folder}, the newest intact checkpoint\n")
        return folder, manifest
    if damaged_files:
        raise UserError(f"{damaged_files[0]}; no older checkpoint is intact")
    return None
