"""Interface of a shard codec, and the codecs of arrays: ids and latents.

A codec converts between a sample and its payload, the bytes of its tar member. Nothing else in the
shard writer, data set or loader depends on the kind of shard: to add a kind, write a codec and add
it to `registry.py`.

- `.tok`: palette tokens, nine bits each (`format/shards.py`). `.ids`: little-endian uint16.
- `.lat`: the mean of a VAE's posterior, then its scale, each `[c, h, w]`, little-endian float16; if
  the flipped image is stored too, its mean and scale follow.

Legend: b samples, n tokens of a sample, c channels, h and w of the latent grid.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Protocol

import numpy as np

from megavis.data.codecs.transforms import Transform
from megavis.data.format.shards import MAX_TOKENS, pack_tokens, payload_bytes, unpack_tokens

Payloads = Sequence[np.ndarray]
"""One uint8 `[length]` per sample."""
Refusals = dict[int, str]
"""Rows of a batch that could not be decoded, with the reason."""

MAX_IDS = 1 << 16
UNKNOWN_ID = "token beyond the vocabulary"
NOT_FINITE = "not finite"


class Codec(ABC):
    """Decodes the payloads of one kind of shard.

    Attributes:
        num_bytes: length of every payload; None if lengths vary.
    """

    num_bytes: int | None = None

    @abstractmethod
    def decode(self, payloads: Payloads, positions: np.ndarray) -> tuple[np.ndarray, Refusals]:
        """Decode payloads of valid length.

        Positions int64 `[b]` determine random crops and flips. Whether a payload is rejected
        depends only on its bytes.

        Returns:
            An array with b rows, undefined in rejected ones, and the reason for each rejection.
        """

    def valid_lengths(self, lengths: np.ndarray) -> np.ndarray:
        """Return bool `[b]`: whether each payload length, int64 `[b]`, is valid."""
        return lengths > 0 if self.num_bytes is None else lengths == self.num_bytes


class PaletteLike(Protocol):
    """The part of a palette (`tokenizers/palette.py`) that decoding needs."""

    @property
    def sha256(self) -> str: ...  # noqa: D102 - see above

    def __len__(self) -> int: ...

    def encode(self, images: np.ndarray) -> np.ndarray:
        """Map pixels uint8 `[..., 3]` to ids uint16 `[...]`."""


class PaletteCodec(Codec):
    """Palette tokens, nine bits each (`shards.py`): uint16 `[b, n]` in raster order.

    Crops, shifts and flips commute with the palette, so they are applied to ids. With crops, n is
    the number of tokens of a crop.

    Args:
        num_tokens: tokens of a stored image.
        vocabulary_size: at most 512.
        transform: crops and flips to apply, if any.
    """

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
        """Encode ids `[n]`; raises ValueError if one is 512 or more."""
        return pack_tokens(tokens.reshape(1, self.num_tokens)).tobytes()

    def decode(self, payloads: Payloads, positions: np.ndarray) -> tuple[np.ndarray, Refusals]:
        """Decode to ids uint16 `[b, n]`."""
        rows = _stack(payloads, self.num_bytes)
        tokens = unpack_tokens(rows, num_tokens=self.num_tokens)
        return self._transformed(tokens, positions), _unknown_ids(tokens, self.vocabulary_size)

    def _transformed(self, tokens: np.ndarray, positions: np.ndarray) -> np.ndarray:
        transform = self._transform
        if transform is None or (transform.crop == "none" and not transform.flip):
            return tokens
        side = math.isqrt(self.num_tokens)
        draws = transform.draws(positions)
        images = tokens.reshape(-1, side, side)
        results = [transform(image, draw) for image, draw in zip(images, draws, strict=True)]
        return np.array(results, tokens.dtype).reshape(len(tokens), transform.image_size**2)


class IdsCodec(Codec):
    """Ids of a discrete tokenizer, little-endian uint16: uint16 `[b, n]` in raster order.

    Args:
        vocabulary_size: at most 65,536.
    """

    def __init__(self, num_tokens: int, *, vocabulary_size: int = MAX_IDS) -> None:
        self.num_tokens, self.vocabulary_size = num_tokens, vocabulary_size
        self.num_bytes = 2 * num_tokens

    def encode(self, ids: np.ndarray) -> bytes:
        """Encode ids `[n]`; raise ValueError for another shape, or ids outside the vocabulary."""
        ids = ids.reshape(self.num_tokens)
        if ids.size and (ids.min() < 0 or ids.max() >= self.vocabulary_size):
            raise ValueError(f"ids must lie in [0, {self.vocabulary_size})")
        return ids.astype("<u2").tobytes()

    def decode(self, payloads: Payloads, positions: np.ndarray) -> tuple[np.ndarray, Refusals]:
        """Decode to ids uint16 `[b, n]`."""
        ids = _stack(payloads, self.num_bytes).view("<u2").astype(np.uint16, copy=False)
        return ids, _unknown_ids(ids, self.vocabulary_size)


def _stack(payloads: Payloads, num_bytes: int | None) -> np.ndarray:
    """Return a writable copy, uint8 `[b, num_bytes]`."""
    assert num_bytes is not None
    if not payloads:
        return np.empty((0, num_bytes), np.uint8)
    return np.concatenate(payloads).reshape(len(payloads), num_bytes)


def _unknown_ids(ids: np.ndarray, vocabulary_size: int) -> Refusals:
    # Test the whole batch first, since rows rarely need testing.
    if not ids.size or ids.max() < vocabulary_size:
        return {}
    rows = np.flatnonzero((ids >= vocabulary_size).any(axis=1))
    return {int(row): UNKNOWN_ID for row in rows}


class LatentsCodec(Codec):
    """Posterior mean and scale of a VAE: float16 `[b, 2, c, h, w]`.

    Args:
        shape: c, h, w.
        flipped: whether payloads include the flipped image's latents.
        transform: chooses between image and flipped image; without it, the image is read.
    """

    def __init__(
        self,
        shape: tuple[int, int, int],
        *,
        flipped: bool = False,
        transform: Transform | None = None,
    ) -> None:
        self.shape = (2 if flipped else 1, 2, *shape)
        self.num_bytes = 2 * int(np.prod(self.shape))
        self._transform = transform

    def encode(self, latents: np.ndarray) -> bytes:
        """Encode `[2, c, h, w]`, or `[2, 2, c, h, w]` with the flipped image's latents.

        Raises:
            ValueError: a value is not finite in float16 (at most 65,504), a scale is negative, or
                the shape is wrong.
        """
        with np.errstate(over="ignore"):  # overflow is detected below
            half = latents.reshape(self.shape).astype("<f2")
        if not np.isfinite(half).all():
            raise ValueError("latents must be finite in float16")
        if (half[:, 1] < 0).any():
            raise ValueError("scales must not be negative")
        return half.tobytes()

    def decode(self, payloads: Payloads, positions: np.ndarray) -> tuple[np.ndarray, Refusals]:
        """Decode to float16 `[b, 2, c, h, w]`."""
        rows = _stack(payloads, self.num_bytes)
        views = rows.view("<f2").reshape(-1, *self.shape).astype(np.float16, copy=False)
        finite = np.isfinite(views).all(axis=(1, 2, 3, 4, 5))
        refused = {int(row): NOT_FINITE for row in np.flatnonzero(~finite)}
        which = np.zeros(len(payloads), np.int64)
        if self._transform is not None and self.shape[0] == 2:
            which = self._transform.flips(positions).astype(np.int64)
        return views[np.arange(len(payloads)), which], refused
