"""Interface of a shard codec, and the two codecs of ids.

A codec turns the payload of a sample, the bytes of its tar member, into numbers and back. Shards,
data set and loader know nothing else of a kind: a new one is a codec and a line in `registry.py`.

Legend: b samples, n tokens of a sample.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar, Protocol

import numpy as np

from megavis.data.codecs.transforms import Transform
from megavis.data.format.token_packing import MAX_TOKENS, pack_tokens, payload_bytes, unpack_tokens

Payloads = Sequence[np.ndarray]
"""One uint8 `[length]` a sample: a view of a mapped tar."""
Refusals = dict[int, str]
"""Rows of a batch that give no sample, and why."""

MAX_IDS = 1 << 16
UNKNOWN_ID = "token beyond the vocabulary"


class PaletteLike(Protocol):
    """A palette, as far as reading images needs it (`tokenizers/palette.py`).

    Attributes:
        sha256: its identity.
    """

    @property
    def sha256(self) -> str: ...  # noqa: D102 - see above

    def __len__(self) -> int: ...

    def encode(self, images: np.ndarray) -> np.ndarray:
        """Return the ids uint16 `[...]` of pixels uint8 `[..., 3]`."""


class Codec(ABC):
    """The payload of one kind of shard.

    Attributes:
        suffix: of the tar members, after the dot.
        num_bytes: length of every payload; None where lengths differ.
    """

    suffix: ClassVar[str]
    num_bytes: int | None = None

    @abstractmethod
    def decode(self, payloads: Payloads, positions: np.ndarray) -> tuple[np.ndarray, Refusals]:
        """Decode payloads of the right length.

        Args:
            payloads: of b samples.
            positions: int64 `[b]`, which decide random crops and flips, and nothing else: what
                is refused depends on the bytes alone.

        Returns:
            One array with the samples first, rows that are refused holding anything, and why each
            of those is refused.
        """

    def right_length(self, lengths: np.ndarray) -> np.ndarray:
        """Return bool `[b]`: can payloads of these lengths int64 `[b]` be samples?"""
        return lengths > 0 if self.num_bytes is None else lengths == self.num_bytes


class PaletteCodec(Codec):
    """Palette tokens, nine bits each (`token_packing.py`): uint16 `[b, n]` in raster order.

    A colour is moved as its pixel is: cutting, shifting and mirroring give the same before the
    palette. Where squares are cut, n is that of the squares.

    Args:
        num_tokens: of a stored image.
        vocabulary_size: every id is below it; at most 512.
        transform: how images are cut and moved; None for as they are.
    """

    suffix = "tok"

    def __init__(
        self,
        num_tokens: int,
        *,
        vocabulary_size: int = MAX_TOKENS,
        transform: Transform | None = None,
    ) -> None:
        self.num_tokens, self.vocabulary_size = num_tokens, vocabulary_size
        self._transform = transform
        self.num_bytes = payload_bytes(num_tokens)

    def encode(self, tokens: np.ndarray) -> bytes:
        """Return the payload of ids `[n]`; raises ValueError where one is 512 or more."""
        return pack_tokens(tokens.reshape(1, self.num_tokens)).tobytes()

    def decode(self, payloads: Payloads, positions: np.ndarray) -> tuple[np.ndarray, Refusals]:
        """Return ids uint16 `[b, n]`."""
        rows = _stack(payloads, self.num_bytes)
        tokens = unpack_tokens(rows, num_tokens=self.num_tokens)
        return self._moved(tokens, positions), _unknown_ids(tokens, self.vocabulary_size)

    def _moved(self, tokens: np.ndarray, positions: np.ndarray) -> np.ndarray:
        move = self._transform
        if move is None or (move.crop == "none" and not move.flip):
            return tokens
        side = math.isqrt(self.num_tokens)
        draws = move.draws(positions)
        images = tokens.reshape(-1, side, side)
        moved = [move(image, draw) for image, draw in zip(images, draws, strict=True)]
        return np.array(moved, tokens.dtype).reshape(len(tokens), -1)


class IdsCodec(Codec):
    """Ids of a discrete tokenizer, little-endian uint16: uint16 `[b, n]` in raster order.

    Args:
        num_tokens: n.
        vocabulary_size: every id is below it; at most 65,536.
    """

    suffix = "ids"

    def __init__(self, num_tokens: int, *, vocabulary_size: int = MAX_IDS) -> None:
        self.num_tokens, self.vocabulary_size = num_tokens, vocabulary_size
        self.num_bytes = 2 * num_tokens

    def encode(self, ids: np.ndarray) -> bytes:
        """Return the payload of ids `[n]`.

        Raises:
            ValueError: their number is not n, or one is not below the vocabulary size.
        """
        ids = ids.reshape(self.num_tokens)
        if ids.size and (ids.min() < 0 or ids.max() >= self.vocabulary_size):
            raise ValueError(f"ids must lie in [0, {self.vocabulary_size})")
        return ids.astype("<u2").tobytes()

    def decode(self, payloads: Payloads, positions: np.ndarray) -> tuple[np.ndarray, Refusals]:
        """Return ids uint16 `[b, n]`."""
        ids = _stack(payloads, self.num_bytes).view("<u2").astype(np.uint16, copy=False)
        return ids, _unknown_ids(ids, self.vocabulary_size)


def _stack(payloads: Payloads, num_bytes: int | None) -> np.ndarray:
    """Return uint8 `[b, num_bytes]`, a copy: the maps are read-only."""
    assert num_bytes is not None
    if not payloads:
        return np.empty((0, num_bytes), np.uint8)
    return np.concatenate(payloads).reshape(len(payloads), num_bytes)


def _unknown_ids(ids: np.ndarray, vocabulary_size: int) -> Refusals:
    # The whole batch first: rows are looked at only where there is something to find.
    if not ids.size or ids.max() < vocabulary_size:
        return {}
    rows = np.flatnonzero((ids >= vocabulary_size).any(axis=1))
    return {int(row): UNKNOWN_ID for row in rows}
