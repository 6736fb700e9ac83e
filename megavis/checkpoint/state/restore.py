"""Load a checkpoint into any layout, and find the newest intact one to resume from.

Each process reads only the elements that it holds: under ZeRO, its partition.
"""

from __future__ import annotations

import functools
import socket
import sys
import time
from collections.abc import Sequence, Set
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from megavis.checkpoint.format.folder import checkpoints_by_age, set_aside
from megavis.checkpoint.format.manifest import (
    CheckpointManifest,
    StoredFile,
    file_damage,
    read_manifest,
    size_damage,
)
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

STALE_SECONDS = 90.0
"""How long a node may see a file otherwise than the main process: longer than network disks cache
names and sizes, a minute by default on NFS."""
_LOOK_SECONDS = 1.0


def load_training_state(folder: Path, states: ParameterStates) -> CheckpointManifest:
    """Load weights, moments and step count into a DeepSpeed engine of any layout.

    The files of `folder` must be verified already (`newest_intact_checkpoint`). Raises UserError on
    every process if the model differs.
    """
    with CheckpointReader(folder) as reader:
        averages = states.averages and reader.evaluated == AVERAGE
        # torch creates states in its first step, which is too late to set them.
        states.create_states(reader.manifest.optimizer_step, with_average=averages)
        for name, parameter in states.layers.named_parameters():
            for kind in states.kinds(parameter):
                held = states.held(parameter, kind)
                values = _elements(reader, f"{kind}/{name}", held, parameter, states.context)
                states.set_held(parameter, kind, values)
        _fill_buffers(reader, states.layers)
        return reader.manifest


def start_from_weights(folder: Path, states: ParameterStates, *, with_head: bool = False) -> None:
    """Load another run's weights into a DeepSpeed engine of any layout, before its first step.

    Parameters that declare so (`Start`) keep their initial weights, unless `with_head`: both runs
    have the same head of a task. Raises UserError on every process if a file is damaged or the
    model differs.
    """
    folder, _ = check_files(folder, states.context)
    with CheckpointReader(folder) as reader:
        if with_head:
            # All buffers are batch-norm statistics in the head.
            _fill_buffers(reader, states.layers)
        for name, parameter in states.layers.named_parameters():
            is_saved = f"weight/{name}" in reader.manifest.tensors
            if (with_head and is_saved) or not starts_fresh(parameter, is_saved=is_saved):
                held = states.held(parameter, "weight")
                values = _weight(reader, name, held, parameter, states.context)
                states.set_held(parameter, "weight", values)


def start_encoder(pretrained: StartingWeights, states: ParameterStates) -> None:
    """Load the weights of an encoder into a DeepSpeed engine of any layout, before its first step.

    All other weights keep their initial values. Raises UserError on every process if a file is
    damaged or lacks a tensor.
    """
    folder, _ = check_files(pretrained.checkpoint, states.context)
    with CheckpointReader(folder) as reader:
        for name, parameter in states.layers.named_parameters():
            whole = pretrained.tensor(reader, name)
            if whole is not None:
                states.set(parameter, "weight", own_slice(whole, parameter, states.context))


def load_weights(folder: Path, layers: LocalLayers, context: ParallelContext) -> CheckpointManifest:
    """Load the evaluation weights, EMA if there is one, into modules without an engine.

    Learned positions are interpolated to another grid, here and in `start_from_weights`, since
    images may have another size than in training.
    """
    folder, manifest = check_files(folder, context)
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


@dataclass(frozen=True)
class _Complaint:
    """A file that one process finds damaged."""

    name: str
    text: str
    host: str
    has_whole_size: bool
    by_main: bool


Found = tuple[Path, CheckpointManifest]


def check_files(folder: Path, context: ParallelContext) -> Found:
    """Verify size and SHA-256 of all files; the files are divided among the processes.

    Returns the main process's folder and manifest. Processes that look for the newest checkpoint of
    a run that still trains, or on a node that sees an outdated folder, may come with another.

    On every process, raises UserError, naming the first damaged file, if the main process finds it
    damaged too. Raises OSError if any process cannot read a file, or for `STALE_SECONDS` sees
    another content than the main process: then the file is not known to be damaged.
    """
    own = folder
    folder, manifest = context.on_main(lambda: (own, read_manifest(own)))
    files = sorted(manifest.files.items())
    mine: Sequence[tuple[str, StoredFile]] = files[context.world.rank :: context.world.size]
    begin = time.monotonic()
    while True:
        mine, complaint = _first_damage(folder, mine, context)
        found = context.gather(complaint)
        # Report read errors first: a file that one process cannot read is not known to be damaged,
        # and must not be set aside.
        for error in found:
            if isinstance(error, OSError):
                raise error
        complaints = [each for each in found if isinstance(each, _Complaint)]
        if not complaints:
            return folder, manifest
        judged = functools.partial(_judge, folder, manifest, complaints, begin)
        context.on_main(judged)
        time.sleep(_LOOK_SECONDS)


def _first_damage(
    folder: Path, files: Sequence[tuple[str, StoredFile]], context: ParallelContext
) -> tuple[Sequence[tuple[str, StoredFile]], _Complaint | OSError | None]:
    """Return the first damage among files, and the files to verify again: from that one on."""
    for index, (name, stored) in enumerate(files):
        try:
            text = file_damage(folder / name, stored)
            if text is None:
                continue
            has_whole_size = size_damage(folder / name, stored) is None
        except OSError as error:
            return files[index:], error
        host, by_main = socket.gethostname(), context.is_main
        return files[index:], _Complaint(name, text, host, has_whole_size, by_main)
    return (), None


def _judge(
    folder: Path, manifest: CheckpointManifest, complaints: Sequence[_Complaint], begin: float
) -> None:
    """Compare complaints with what this process, the main one, sees.

    Raises:
        UserError: a file is damaged.
        OSError: it is whole, but another node has not seen it so since `begin`.
    """
    for each in complaints:
        # Reading every file here that another node does not see would take far longer than there.
        look = file_damage if each.has_whole_size else size_damage
        if each.by_main or look(folder / each.name, manifest.files[each.name]) is not None:
            raise UserError(each.text)
    # A network disk's cache shows new files late.
    if time.monotonic() > begin + STALE_SECONDS:
        first = complaints[0]
        raise OSError(
            f"{first.text}; so it looks from {first.host}, while {socket.gethostname()} sees the"
            " whole file: the disk of that node should show the same files"
        )


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


def newest_intact_checkpoint(
    run_folder: Path, context: ParallelContext, *, up_to: int | None = None
) -> Found | None:
    """Return the newest intact checkpoint, optionally up to a step; None if there is none.

    Collective over all processes. Newer, damaged checkpoints are reported, renamed and skipped, so
    that the run repeats their steps with the same samples and draws.

    Raises:
        UserError: on every process, if there are checkpoints and all are damaged.
        OSError: likewise, if one cannot be read, or looks damaged from another node only.
    """
    # The main process decides, since other nodes may see an outdated folder.
    folders = context.on_main(lambda: checkpoints_by_age(run_folder, up_to=up_to))
    damaged_files: list[str] = []
    for folder in folders:
        try:
            found = check_files(folder, context)
        except UserError as error:
            damaged_files.append(str(error))
            continue
        if damaged_files:
            damaged = folders[: len(damaged_files)]
            context.on_main(functools.partial(set_aside, run_folder, damaged, newest=folder))
            if context.is_main:
                sys.stderr.writelines(f"WARNING: {text}\n" for text in damaged_files)
                sys.stderr.write(f"WARNING: resuming from {folder}, the newest intact checkpoint\n")
        return found
    if damaged_files:
        raise UserError(f"{damaged_files[0]}; no older checkpoint is intact")
    return None
