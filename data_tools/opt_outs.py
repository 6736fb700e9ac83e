"""`filter --exclude`: hashes of images whose owners opted out."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from megavis.config.errors import UserError

_SHA256_DIGITS, _PERCEPTUAL_DIGITS = 64, 16


@dataclass(frozen=True)
class Excluded:
    """Hashes of images that must not be used.

    Attributes:
        sha256: of files, in hexadecimal.
        perceptual: ImageHash's `phash`, 64 bits; near-duplicates are excluded too.
    """

    sha256: frozenset[str] = frozenset()
    perceptual: tuple[int, ...] = ()


def read_excluded(path: Path | None) -> Excluded:
    """Read a file of `--exclude`; the rest of a line after its hash is ignored.

    Raises:
        UserError: it cannot be read, or a line has no hash.
    """
    if path is None:
        return Excluded()
    sha256, perceptual = set(), set()
    try:
        lines = path.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"--exclude {path} cannot be read: {error}") from None
    for number, line in enumerate(lines, 1):
        word = (line.split() or [""])[0].lower()
        if not word or word.startswith("#"):
            continue
        if len(word) not in (_SHA256_DIGITS, _PERCEPTUAL_DIGITS) or set(word) - set(
            "0123456789abcdef"
        ):
            raise UserError(
                f"--exclude {path} line {number}: {word!r} is neither a SHA-256 (64 hexadecimal "
                "digits) nor a perceptual hash (16)"
            )
        if len(word) == _SHA256_DIGITS:
            sha256.add(word)
        else:
            perceptual.add(int(word, 16))
    return Excluded(frozenset(sha256), tuple(sorted(perceptual)))
