"""Reduce JPEG and PNG files to the parts that determine their pixels.

Decoders complain about metadata as they do about pixels: libjpeg's warnings about profiles,
versions and unused fields cannot be distinguished from those about missing data, and Pillow rejects
long texts. The file without its metadata is decoded strictly instead, so that only damage to the
pixels is an error.
"""

from __future__ import annotations

import re
import struct

_START, _END, _SCAN = 0xD8, 0xD9, 0xDA
# Markers without a length: TEM and the restart markers.
_BARE = {0x01, *range(0xD0, 0xD8)}
_SEQUENTIAL = {0xC0, 0xC1, 0xC9}
_JFIF, _ADOBE, _COMMENT = 0xE0, 0xEE, 0xFE
_METADATA = {*range(0xE1, 0xF0), _COMMENT} - {_ADOBE}
_JFIF_VERSION = len(b"JFIF\0")
# In the data of a scan, FF 00 is a byte and FF D0 to FF D7 are restarts.
_NEXT_MARKER = re.compile(rb"\xff+([^\x00\xff\xd0-\xd7])")
_ANY_MARKER = re.compile(rb"\xff+([^\x00\xff])")
_WHOLE_SPECTRUM = b"\x00\x3f\x00"

_PNG_START = b"\x89PNG\r\n\x1a\n"
_PNG_METADATA = frozenset(
    b"tEXt zTXt iTXt iCCP eXIf tIME pHYs gAMA cHRM sRGB sBIT bKGD hIST sPLT cICP caBX".split()
)
_CHUNK_FRAME = 12  # length, name and checksum of a chunk


def pixels_of_jpeg(content: bytes) -> bytes | None:
    """Return a JPEG file without metadata, which decodes to the same pixels.

    Fields that sequential files do not use get the values that the standard requires (some phones
    write an Se of 0). Bytes between segments and zeros before the end are dropped. None if the
    file is not a JPEG or is cut before its first scan.
    """
    if content[:2] != b"\xff\xd8":
        return None
    parts, place, sequential, has_scan = [content[:2]], 2, False, False
    while match := _ANY_MARKER.search(content, place):
        marker, place = match[1][0], match.end()
        if marker == _END:
            parts[-1] = parts[-1].rstrip(b"\0") if has_scan else parts[-1]
            return b"".join([*parts, b"\xff\xd9"])
        if marker in _BARE:
            continue
        length = int.from_bytes(content[place : place + 2], "big")
        body = content[place + 2 : place + length]
        if marker == _START or length < 2 or len(body) < length - 2:
            break
        place += length
        sequential = sequential or marker in _SEQUENTIAL
        if marker == _SCAN and sequential:
            body = body[:-3] + _WHOLE_SPECTRUM
        if marker not in _METADATA:
            parts.append(_segment(marker, body))
        if marker == _SCAN:
            has_scan = True
            following = _NEXT_MARKER.search(content, place)
            end = following.start() if following else len(content)
            parts.append(content[place:end])
            place = end
    return b"".join(parts) if has_scan else None


def _segment(marker: int, body: bytes) -> bytes:
    if marker == _JFIF and body.startswith(b"JFIF\0"):
        body = body[:_JFIF_VERSION] + b"\1" + body[_JFIF_VERSION + 1 :]
    return bytes((0xFF, marker)) + struct.pack(">H", len(body) + 2) + body


def pixels_of_png(content: bytes) -> bytes | None:
    """Return a PNG file without texts, profiles and the like; None if it is not a PNG.

    Unknown chunks stay, since damage may have renamed one of the pixels. A cut file stays cut.
    """
    if not content.startswith(_PNG_START):
        return None
    parts, place = [_PNG_START], len(_PNG_START)
    while place + _CHUNK_FRAME <= len(content):
        end = place + _CHUNK_FRAME + int.from_bytes(content[place : place + 4], "big")
        name = content[place + 4 : place + 8]
        if name not in _PNG_METADATA:
            parts.append(content[place:end])
        place = end
        if name == b"IEND":
            break
    return b"".join(parts)
