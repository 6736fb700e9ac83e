"""Random access to the logical tensors of a checkpoint, independent of model and layout.

Files are memory-mapped safetensors; nothing is unpickled. Tokenizers are trained runs too, so this
module lies below `tokenizers`; `state/restore.py` loads tensors into models.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megavis.checkpoint.format.manifest import LogicalTensor, TensorKind, read_manifest
from megavis.checkpoint.format.tensor_files import open_tensors
from megavis.config.errors import UserError
from megavis.parallel.progress_bar import shown


class CheckpointReader:
    """Random access to the logical tensors of a checkpoint; a context manager."""

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
        """Kind of the weights used in evaluation: the EMA if there is one."""
        averaged = any(key.startswith("average/") for key in self.manifest.tensors)
        return "average" if averaged else "weight"

    def weight_key(self, name: str) -> str:
        """Return the key of a parameter's weight for evaluation; frozen ones have no EMA."""
        key = f"{self.evaluated}/{name}"
        return key if key in self.manifest.tensors else f"weight/{name}"

    def weights_sha256(self) -> str:
        """Return a hash of the evaluation weights, from the manifest's hashes of their files.

        It depends on the layout that saved them.
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
        """Return the shape of a logical tensor, or None if it does not exist."""
        entry = self.manifest.tensors.get(key)
        return None if entry is None else torch.Size(entry.shape)

    def read(
        self, key: str, start: int = 0, length: int | None = None, *, dimension: int | None = None
    ) -> Tensor:
        """Return a logical tensor, or a slice of it. Raises UserError if there is none.

        Args:
            key: `<kind>/<parameter name>`.
            start: first index of the slice.
            length: of the slice; by default to the end.
            dimension: of the slice; by default that of the stored slices.
        """
        if key not in self.manifest.tensors:
            raise UserError(f"{self.folder}: has no tensor {key}; it was saved by another model")
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
            # A tensor stored in one piece can be sliced along any dimension.
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
            self._files[name] = self._open.enter_context(open_tensors(self.folder / name))
        return self._files[name]


def read_weights(checkpoint: Path, prefix: str = "") -> dict[str, Tensor]:
    """Read full parameters from a checkpoint of any layout; EMA weights if there are any.

    `prefix` selects names, and is removed from them.
    """
    start = f"weight/{prefix}"
    with CheckpointReader(checkpoint) as reader:
        keys = [key for key in reader.manifest.tensors if key.startswith(start)]
        return {
            key.removeprefix(start): reader.read(reader.weight_key(key.removeprefix("weight/")))
            for key in shown(keys, "weights", total=len(keys), unit="tensor")
        }
