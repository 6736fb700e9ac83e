"""DMLab of VTAB: JPEG images in TFRecord files.

A record is its length (uint64), a CRC of four bytes, its content, and another CRC. The content is a
`tf.train.Example` in the wire format of protocol buffers: a map from names to lists of bytes,
floats or integers. Images stay in place and are read by offset.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Iterator
from pathlib import Path

from data_tools.labelled.data_set import Listing
from data_tools.sources import SourceFile
from megavis.config.errors import UserError

_LENGTH = struct.Struct("<Q")
_CHECK_BYTES = 4
_VARINT, _DELIMITED = 0, 2
# Field numbers of Example, Features, the map's entries, and Feature.
_FEATURES, _ENTRY, _KEY, _VALUE, _BYTES_LIST, _INT64_LIST = 1, 1, 1, 2, 1, 3
_NUM_CLASSES = 6


def list_dmlab(root: Path, split: str) -> Listing:
    """List DMLab's frames.

    Classes have numbers and no names: {close, far, very far} × {positive, negative reward}.
    """
    paths = sorted(root.glob(f"dmlab-{split}.tfrecord*"))
    if not paths:
        raise UserError(f"{root} has no dmlab-{split}.tfrecord: give the unpacked folder of DMLab")
    files = [file for path in paths for file in _read_records(path)]
    return Listing([str(number) for number in range(_NUM_CLASSES)], files)


def _read_records(path: Path) -> Iterator[SourceFile]:
    with path.open("rb") as opened, mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as data:
        try:
            for number, (start, end) in enumerate(_records(data)):
                features = dict(_features(data, start, end))
                first, last = features["image"]
                label, _ = _varint(data, features["label"][0])
                name = f"{path.name}/{number:06d}.jpg"
                yield SourceFile(name, label, last - first, path.name, first)
        except (KeyError, IndexError, ValueError, struct.error):
            raise UserError(f"{path} is truncated or has no records of DMLab") from None


def _records(data: mmap.mmap) -> Iterator[tuple[int, int]]:
    """Yield start and end of each record. Raises ValueError if the file is truncated."""
    place = 0
    while place < len(data):
        start = place + _LENGTH.size + _CHECK_BYTES
        end = start + _LENGTH.unpack_from(data, place)[0]
        place = end + _CHECK_BYTES
        if place > len(data):
            raise ValueError("cut")
        yield start, end


def _features(data: mmap.mmap, start: int, end: int) -> Iterator[tuple[str, tuple[int, int]]]:
    """Yield name and position of the first value of each feature of an Example."""
    for number, *features in _fields(data, start, end):
        if number != _FEATURES:
            continue
        for _, *entry in _fields(data, *features):
            parts = {number: (first, last) for number, first, last in _fields(data, *entry)}
            first, last = parts[_KEY]
            for kind, *values in _fields(data, *parts[_VALUE]):
                # Bytes are fields of the list; integers may be packed into a single field.
                _, *value = next(_fields(data, *values))
                if kind in (_BYTES_LIST, _INT64_LIST):
                    yield data[first:last].decode(), (value[0], value[1])


def _fields(data: mmap.mmap, start: int, end: int) -> Iterator[tuple[int, int, int]]:
    """Yield number, start and end of each field of a message."""
    while start < end:
        tag, start = _varint(data, start)
        if tag & 7 == _DELIMITED:
            length, start = _varint(data, start)
            last = start + length
        elif tag & 7 == _VARINT:
            _, last = _varint(data, start)
        else:
            raise ValueError("a field of another type")
        if last > end:
            raise ValueError("a field that ends after its message")
        yield tag >> 3, start, last
        start = last


def _varint(data: mmap.mmap, place: int) -> tuple[int, int]:
    """Decode a varint; return its value and its end."""
    value = shift = 0
    while True:
        byte = data[place]
        value |= (byte & 127) << shift
        place, shift = place + 1, shift + 7
        if byte < 128:
            return value, place
