"""Name the damaged file of a checkpoint, and the tensor in it."""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterator
from pathlib import Path

from megavis.checkpoint.format.manifest import CHECKSUMS, StoredFile, file_damage, read_manifest
from megavis.config.errors import UserError

_PIECE = 1 << 24
_LENGTH_BYTES = 8


def damages(folder: Path) -> Iterator[str]:
    """Yield what is wrong with a checkpoint, a sentence each; every byte of it is read.

    A file whose SHA-256 is another one is compared tensor by tensor with the checksums in its
    header, which were written with it.
    """
    try:
        manifest = read_manifest(folder)
    except UserError as error:
        yield str(error)
        return
    for name, stored in sorted(manifest.files.items()):
        complaint = file_damage(folder / name, stored)
        if complaint is not None:
            yield f"{complaint}: {', '.join(_hit(folder / name, stored))}"


def _hit(path: Path, stored: StoredFile) -> list[str]:
    """Return the names of the tensors whose bytes are not those that were written."""
    if not path.is_file() or path.stat().st_size != stored.size:
        return ["the whole file"]
    with path.open("rb") as file:
        length = int.from_bytes(file.read(_LENGTH_BYTES), "little")
        try:
            if length > stored.size:
                raise ValueError
            header = json.loads(file.read(length))
            checksums = json.loads(header.pop("__metadata__", {}).get(CHECKSUMS, "{}"))
            found = [
                key
                for key, entry in header.items()
                if key in checksums
                and _checksum_at(path, _LENGTH_BYTES + length, entry["data_offsets"])
                != checksums[key]
            ]
        except (ValueError, KeyError, TypeError, AttributeError):
            # No JSON any more, or not of this form.
            return ["its header"]
    if found or checksums:
        return found or ["its header"]
    return ["it was written before checksums of tensors were stored, so any of them"]


def _checksum_at(path: Path, start: int, offsets: list[int]) -> int:
    """Return the CRC-32 of the bytes `[begin, end)` behind `start`."""
    begin, end = offsets
    checksum = 0
    with path.open("rb") as file:
        file.seek(start + begin)
        while begin < end:
            piece = file.read(min(_PIECE, end - begin))
            if not piece:
                break
            checksum, begin = zlib.crc32(piece, checksum), begin + len(piece)
    return checksum
