"""Reading a checkpoint into any layout.

Files are memory-mapped safetensors: a process reads the bytes of its own slices, one parameter at
a time, and nothing is ever unpickled.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import safe_open
from torch import Tensor, nn

from megavis.checkpoint.manifest import KINDS, Kind, LogicalTensor, Manifest, read_manifest
from megavis.checkpoint.state import ParameterStates, logical_shape, set_gathered
from megavis.config.errors import UserError
from megavis.data.files import sha256_of_file
from megavis.model.stack import LocalLayers
from megavis.parallel.context import ParallelContext
from megavis.parallel.tensors import partition_dimension


class CheckpointReader:
    """Random access to the logical tensors of one checkpoint; a context manager."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.manifest = folder, read_manifest(folder)
        self._open = ExitStack()
        self._files: dict[str, Any] = {}

    def __enter__(self) -> CheckpointReader:
        return self

    def __exit__(self, *_: object) -> None:
        self._files.clear()
        self._open.close()

    def read(
        self, key: str, start: int = 0, length: int | None = None, *, dimension: int | None = None
    ) -> Tensor:
        """Return a logical tensor, or a part of it along one dimension.

        Args:
            key: `<kind>/<parameter name>`.
            start: first row (or column) wanted.
            length: how many; all that follow when absent.
            dimension: along which; that of the stored slices when absent.

        Raises:
            UserError: when the checkpoint has no such tensor.
        """
        if key not in self.manifest.tensors:
            raise UserError(f"{self.folder}: has no tensor {key}; it is of another model")
        entry = self.manifest.tensors[key]
        stored = entry.dimension or 0
        wanted = stored if dimension is None else dimension
        stop = entry.shape[wanted] if length is None else start + length
        if len(entry.slices) > 1 and wanted != stored:
            return self.read(key).narrow(wanted, start, stop - start)
        parts = list(self._parts(entry, wanted, start, stop))
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=wanted)

    def _parts(self, entry: LogicalTensor, dimension: int, start: int, stop: int) -> Iterator[Any]:
        for piece in entry.slices:
            # A tensor in one slice may be cut along any dimension, so its length does not matter.
            extent = piece.length if len(entry.slices) > 1 else entry.shape[dimension]
            first = max(start, piece.start) - piece.start
            last = min(stop, piece.start + extent) - piece.start
            if first < last:
                window = tuple(
                    slice(first, last) if axis == dimension else slice(None)
                    for axis in range(len(entry.shape))
                )
                yield self._file(piece.file).get_slice(piece.key)[window]

    def _file(self, name: str) -> Any:
        if name not in self._files:
            opened = safe_open(self.folder / name, framework="pt")
            self._files[name] = self._open.enter_context(opened)
        return self._files[name]


def load_training_state(
    folder: Path, *, layers: LocalLayers, states: ParameterStates, context: ParallelContext
) -> Manifest:
    """Read weights, moments and step count into a DeepSpeed engine of any layout.

    Raises:
        UserError: on every process, when a file is damaged or the model is another one.
    """
    check_files(folder, context)
    with CheckpointReader(folder) as reader:
        states.create_moments(reader.manifest.optimizer_step)
        for name, parameter in layers.named_parameters():
            for kind in KINDS:
                states.set(parameter, kind, _local_slice(reader, kind, name, parameter, context))
        return reader.manifest


def load_weights(folder: Path, layers: LocalLayers, context: ParallelContext) -> Manifest:
    """Read the weights alone into modules without an engine, for evaluation and sampling."""
    check_files(folder, context)
    with CheckpointReader(folder) as reader, torch.no_grad():
        for name, parameter in layers.named_parameters():
            value = _local_slice(reader, "weight", name, parameter, context)
            set_gathered(parameter, value)
        return reader.manifest


def check_files(folder: Path, context: ParallelContext) -> None:
    """Compare sizes and SHA-256 of all files with the manifest, shared out over the processes.

    Raises:
        UserError: on every process, naming the first damaged file.
    """
    files = sorted(read_manifest(folder).files.items())
    mine = files[context.world.rank :: context.world.size]
    complaint = next((c for name, stored in mine if (c := _complaint(folder / name, stored))), None)
    complaints: list = [None] * context.world.size
    dist.all_gather_object(complaints, complaint, group=context.world.group)
    for text in complaints:
        if text:
            raise UserError(text)


def _complaint(path: Path, stored: Any) -> str | None:
    if not path.exists():
        return f"{path}: missing, although the checkpoint's manifest lists it"
    size = path.stat().st_size
    if size != stored.size:
        return f"{path}: has {size} bytes where the manifest says {stored.size}; it was cut off"
    if sha256_of_file(path) != stored.sha256:
        return (
            f"{path}: its SHA-256 is not the manifest's, so its bytes have changed since it was"
            " saved; resume from an older checkpoint by naming it in checkpoints/latest"
        )
    return None


def _local_slice(
    reader: CheckpointReader,
    kind: Kind,
    name: str,
    parameter: nn.Parameter,
    context: ParallelContext,
) -> Tensor:
    key, shape = f"{kind}/{name}", logical_shape(parameter)
    if kind != "weight" and reader.manifest.optimizer_step == 0:
        # Adam has not taken a step; imported weights come without moments.
        return torch.zeros(shape)
    dimension = partition_dimension(parameter)
    if dimension is None:
        value = reader.read(key)
    else:
        length = shape[dimension]
        value = reader.read(key, length * context.tensor.rank, length, dimension=dimension)
    if value.shape != shape:
        raise UserError(
            f"{reader.folder}: {key} has shape {tuple(value.shape)} where this model wants"
            f" {tuple(shape)}; the config differs from the one that was trained"
        )
    return value
