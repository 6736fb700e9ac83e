"""Shards of VAE latents: mean and scale of each number; training samples afresh each time.

The `.lat` payload is float16, mean then scale, each `[c, h, w]`; where the flipped image is stored
too, its mean and scale follow.

Legend: b samples, c channels, h and w of the latent grid.

Shards of spectrograms: fixed-width frames in sequence.

The `.frm` payload is float16, `[n, d]`, little-endian.

Legend: b samples, n frames of each, d numbers of a frame.
"""

from __future__ import annotations

import numpy as np

from megavis.data.codecs.codec import Codec, Payloads, Refusals
from megavis.data.codecs.transforms import Transform

NOT_FINITE = "not finite"


class LatentsCodec(Codec):
    """Mean and scale of a VAE: float16 `[b, 2, c, h, w]`.

    Args:
        shape: c, h, w.
        flipped: the payload holds the flipped image's latents as well.
        transform: decides which of the two is read; without one, the image as it is.
    """

    suffix = "lat"

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
        """Return the payload of `[2, c, h, w]`, or `[2, 2, c, h, w]` with the flipped image's.

        Raises:
            ValueError: a number is not finite (in float16: at most 65,504), a scale is negative,
                or the shape is another.
        """
        with np.errstate(over="ignore"):  # what float16 cannot hold is refused below
            half = latents.reshape(self.shape).astype("<f2")
        if not np.isfinite(half).all():
            raise ValueError("latents must be finite in float16")
        if (half[:, 1] < 0).any():
            raise ValueError("scales must not be negative")
        return half.tobytes()

    def decode(self, payloads: Payloads, positions: np.ndarray) -> tuple[np.ndarray, Refusals]:
        """Return float16 `[b, 2, c, h, w]`."""
        shape = (len(payloads), *self.shape)
        joined = np.concatenate(payloads) if payloads else np.empty(0, np.uint8)
        views = joined.view("<f2").reshape(shape).astype(np.float16, copy=False)
        finite = np.isfinite(views).reshape(len(payloads), -1).all(axis=1)
        refused = {int(row): NOT_FINITE for row in np.flatnonzero(~finite)}
        which = np.zeros(len(payloads), np.int64)
        if self._transform is not None and self.shape[0] == 2:
            which = self._transform.flips(positions).astype(np.int64)
        return views[np.arange(len(payloads)), which], refused


class FramesCodec(Codec):
    """Frames of a spectrogram: float16 `[b, n, d]`.

    Args:
        shape: n and d.
    """

    suffix = "frm"

    def __init__(self, shape: tuple[int, int]) -> None:
        self.shape = shape
        self.num_bytes = 2 * shape[0] * shape[1]

    def encode(self, frames: np.ndarray) -> bytes:
        """Return the payload of `[n, d]`.

        Raises:
            ValueError: a number is not finite in float16 (at most 65,504), or the shape is another.
        """
        with np.errstate(over="ignore"):  # what float16 cannot hold is refused below
            half = frames.reshape(self.shape).astype("<f2")
        if not np.isfinite(half).all():
            raise ValueError("frames must be finite in float16")
        return half.tobytes()

    def decode(self, payloads: Payloads, positions: np.ndarray) -> tuple[np.ndarray, Refusals]:
        """Return float16 `[b, n, d]`."""
        joined = np.concatenate(payloads) if payloads else np.empty(0, np.uint8)
        frames = joined.view("<f2").reshape(len(payloads), *self.shape)
        frames = frames.astype(np.float16, copy=False)
        finite = np.isfinite(frames).all(axis=(1, 2))
        return frames, {int(row): NOT_FINITE for row in np.flatnonzero(~finite)}
