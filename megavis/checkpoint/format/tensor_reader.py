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
    """Random access to the logical tensors of a checkpoint; a context manager.

    Attributes:
        bytes_read: total size of the tensors that were read.
    """

    def __init__(self, folder: Path) -> None:
        self.folder, self.manifest = folder, read_manifest(folder)
        self._open = ExitStack()
        self._files: dict[str, Any] = {}
        self.bytes_read = 0

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

        It depends on the layout that saved the checkpoint.
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
            length: length of the slice; by default to the end.
            dimension: dimension of the slice; by default that of the stored slices.
        """
        entry = self._entry(key)
        along = _along(entry, dimension)
        if along is None:
            wanted = dimension or 0
            return self.read(key).narrow(wanted, start, length or entry.shape[wanted] - start)
        return self._joined([*self._views(entry, along, start, length)], along)

    def read_elements(
        self,
        key: str,
        elements: range,
        start: int = 0,
        length: int | None = None,
        *,
        dimension: int | None = None,
    ) -> Tensor:
        """Return consecutive elements, in row-major order, of the result of `read`, as a vector.

        Reads only these elements, unless the tensor is stored in slices along a dimension other
        than the first: then whole rows of each slice, or everything if the slices are along a
        dimension other than `dimension`.
        """
        entry = self._entry(key)
        if not elements:
            return torch.zeros(0)
        along = _along(entry, dimension)
        if along is None:
            whole = self.read(key, start, length, dimension=dimension).reshape(-1)
            return whole[elements.start : elements.stop]
        views = [*self._views(entry, along, start, length)]
        if len(views) > 1 and along > 0:
            row = sum(view[0].numel() for view in views)
            first, last = elements.start // row, -(-elements.stop // row)
            rows = self._joined([view[first:last] for view in views], along).reshape(-1)
            return rows[elements.start - first * row :][: len(elements)]
        runs: list[Tensor] = []
        passed = 0
        for view in views:
            first, last = max(elements.start - passed, 0), min(elements.stop - passed, view.numel())
            runs += _runs(view, first, last) if first < last else ()
            passed += view.numel()
        return self._joined(runs, 0)

    def _joined(self, views: list[Tensor], dimension: int) -> Tensor:
        """Return the content of views of the files: the only place that reads tensors."""
        self.bytes_read += sum(view.nbytes for view in views)
        return views[0] if len(views) == 1 else torch.cat(views, dim=dimension)

    def _entry(self, key: str) -> LogicalTensor:
        if key not in self.manifest.tensors:
            raise UserError(f"{self.folder}: has no tensor {key}; it was saved by another model")
        return self.manifest.tensors[key]

    def _views(
        self, entry: LogicalTensor, dimension: int, start: int, length: int | None
    ) -> Iterator[Tensor]:
        """Yield views of the mapped files, which are read when their content is used."""
        stop = entry.shape[dimension] if length is None else start + length
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


def _along(entry: LogicalTensor, dimension: int | None) -> int | None:
    """Return the dimension to slice a tensor along; None if it was cut along another."""
    stored = entry.dimension or 0
    wanted = stored if dimension is None else dimension
    return None if len(entry.slices) > 1 and wanted != stored else wanted


def _runs(view: Tensor, start: int, stop: int) -> list[Tensor]:
    """Return vectors of the elements from `start` to `stop` in row-major order, and no others."""
    if view.is_contiguous():
        return [view.view(-1)[start:stop]]
    row = view[0].numel()
    first, last = -(-start // row), stop // row
    if first > last:  # within one row
        return _runs(view[last], start % row, stop % row)
    return [
        *(_runs(view[first - 1], start % row, row) if start % row else ()),
        *([view[first:last].reshape(-1)] if first < last else ()),
        *(_runs(view[last], 0, stop % row) if stop % row else ()),
    ]


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
