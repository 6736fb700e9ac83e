"""Find the damaged files and tensors of a checkpoint."""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterator
from pathlib import Path

from megavis.checkpoint.format.manifest import CHECKSUMS, StoredFile, file_damage, read_manifest
from megavis.config.errors import UserError
from megavis.parallel.progress_bar import shown

_PIECE = 1 << 24
_LENGTH_BYTES = 8


def damages(folder: Path) -> Iterator[str]:
    """Read every byte of a checkpoint and yield a message for each damaged file.

    In a file with a wrong SHA-256, tensors are compared with the checksums in the file's header.
    """
    try:
        manifest = read_manifest(folder)
    except UserError as error:
        yield str(error)
        return
    total = sum(stored.size for stored in manifest.files.values())
    files = shown(
        sorted(manifest.files.items()),
        f"verifying {folder.name}",
        total=total,
        unit="B",
        size=lambda file: file[1].size,
    )
    for name, stored in files:
        damage = file_damage(folder / name, stored)
        if damage is not None:
            yield f"{damage}: {', '.join(_damaged_tensors(folder / name, stored))}"


def _damaged_tensors(path: Path, stored: StoredFile) -> list[str]:
    """Return the names of the tensors whose bytes have changed."""
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
            # Not JSON, or not of the expected form.
            return ["its header"]
    if found or checksums:
        return found or ["its header"]
    return ["any tensor: the file has no checksums of tensors"]


def _checksum_at(path: Path, start: int, offsets: list[int]) -> int:
    """Return the CRC-32 of the bytes `[begin, end)` after `start`."""
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
