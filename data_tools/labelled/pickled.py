"""CIFAR's Python version: pickles, read without letting them call anything but arrays.

A pickle may name any function and have it called. These name three, which build an array; any
other name ends the reading.
"""

from __future__ import annotations

import functools
import io
import pickle  # noqa: S403  # only through `_ArraysOnly`
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import numpy as np

from data_tools.labelled.data_set import Listing, ppm
from data_tools.sources import SourceFile
from megavis.config.errors import UserError

_SIDE = 32
_KNOWN: dict[tuple[str, str], Callable[..., Any]] = {
    ("numpy", "ndarray"): np.ndarray,
    ("numpy", "dtype"): np.dtype,
    # What an array itself asks a pickle to call, wherever this numpy keeps it.
    ("numpy.core.multiarray", "_reconstruct"): cast(Any, np.empty(0).__reduce__()[0]),
}


def list_pickled(root: Path, batches: list[str], *, labels: str, meta: str) -> Listing:
    """List CIFAR's Python version, under the names that the binary version gives its pictures.

    Args:
        root: the folder.
        batches: its files.
        labels: key of the labels in a batch.
        meta: file and key of the class names, with `:` between them.

    Raises:
        UserError: a file is missing, damaged, or calls what no array needs.
    """
    path, key = meta.split(":")
    names = [name.decode() for name in _value(root / path, key, list)]
    files = []
    for batch in batches:
        numbers = _value(root / batch, labels, list)
        if len(numbers) != len(_pixels(root / batch)):
            raise UserError(f"{root / batch} has not as many labels as pictures: it is damaged")
        files += [
            SourceFile(f"{batch}/{place:05d}", int(label), 3 * _SIDE**2, batch, place)
            for place, label in enumerate(numbers)
        ]
    return Listing(names, files, _read)


def _read(file: SourceFile, root: Path) -> bytes:
    planes = _pixels(root / file.path)[file.offset].reshape(3, _SIDE, _SIDE)
    return ppm(planes.transpose(1, 2, 0))


def _pixels(path: Path) -> np.ndarray:
    """Return uint8 `[pictures, 3072]`."""
    pixels = _value(path, "data", np.ndarray)
    if pixels.dtype != np.uint8 or pixels.shape[1:] != (3 * _SIDE**2,):
        raise UserError(f"{path} holds {pixels.dtype} {list(pixels.shape)}, not uint8 [n, 3072]")
    return pixels


def _value(path: Path, key: str, kind: type) -> Any:
    value = _load(path).get(key.encode())
    if not isinstance(value, kind):
        raise UserError(f"{path} has no {key!r}: it is no file of CIFAR's Python version")
    return value


@functools.lru_cache(maxsize=8)
def _load(path: Path) -> dict[bytes, Any]:
    """Return what a pickle of Python 2 holds; kept, since shuffled pictures come from all files."""
    try:
        content = _ArraysOnly(io.BytesIO(path.read_bytes()), encoding="bytes").load()
    except UserError:
        raise
    except FileNotFoundError:
        raise UserError(f"{path} is missing") from None
    except Exception as error:  # damaged pickles raise almost anything
        raise UserError(f"{path} is damaged: {error}") from None
    if not isinstance(content, dict):
        raise UserError(f"{path} is no file of CIFAR's Python version")
    return content


class _ArraysOnly(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _KNOWN:
            raise UserError(
                f"this pickle calls {module}.{name}, which no array needs: take the binary"
                " version of CIFAR (cifar-10-binary.tar.gz, cifar-100-binary.tar.gz)"
            )
        return _KNOWN[module, name]
