"""Random access to the logical tensors of a checkpoint, independent of model and layout.

Files are memory-mapped safetensors, and nothing is ever unpickled. A tokenizer is a trained run as
well, so this lies below `tokenizers`; what fits tensors into a model lies in `restore.py`, far
above.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from megavis.checkpoint.format.manifest import LogicalTensor, TensorKind, read_manifest
from megavis.config.errors import UserError


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

    @property
    def evaluated(self) -> TensorKind:
        """Kind of the weights used in evaluation: their moving average, where there is one."""
        averaged = any(key.startswith("average/") for key in self.manifest.tensors)
        return "average" if averaged else "weight"

    def weight_key(self, name: str) -> str:
        """Return the key of a parameter's value for evaluation; a frozen one has only one."""
        key = f"{self.evaluated}/{name}"
        return key if key in self.manifest.tensors else f"weight/{name}"

    def weights_sha256(self) -> str:
        """Return a hash of the weights of evaluation, made of the manifest's hashes of their files.

        The same weights saved by another layout have another one.
        """
        tensors, files = self.manifest.tensors, self.manifest.files
        names = sorted(key.removeprefix("weight/") for key in tensors if key.startswith("weight/"))
        entries = {name: tensors[self.weight_key(name)] for name in names}
        used = sorted({part.file for entry in entries.values() for part in entry.slices})
        content = {
            "tensors": {name: entry.model_dump() for name, entry in entries.items()},
            "files": {name: files[name].sha256 for name in used},
        }
        return hashlib.sha256(json.dumps(content).encode()).hexdigest()

    def shape(self, key: str) -> torch.Size | None:
        """Return the shape of a logical tensor; None where there is no such."""
        entry = self.manifest.tensors.get(key)
        return None if entry is None else torch.Size(entry.shape)

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


def read_weights(checkpoint: Path, prefix: str = "") -> dict[str, Tensor]:
    """Return parameters whole, from a checkpoint of any layout; averages where there are any.

    Args:
        checkpoint: the folder of one step.
        prefix: of the names that are wanted; it is cut off.
    """
    start = f"weight/{prefix}"
    with CheckpointReader(checkpoint) as reader:
        return {
            key.removeprefix(start): reader.read(reader.weight_key(key.removeprefix("weight/")))
            for key in reader.manifest.tensors
            if key.startswith(start)
        }
