"""Codecs for VAE latents and spectrogram frames, stored as little-endian float16.

A `.lat` payload holds the posterior's mean, then its scale, each `[c, h, w]`; if the flipped image
is stored too, its mean and scale follow. Training samples from the posterior at every read. A
`.frm` payload holds frames `[n, d]`.

Legend: b samples, c channels, h and w of the latent grid, n frames, d values per frame.
"""

from __future__ import annotations

import numpy as np

from megavis.data.codecs.codec import Codec, Payloads, Refusals
from megavis.data.codecs.transforms import Transform

NOT_FINITE = "not finite"


class LatentsCodec(Codec):
    """Posterior mean and scale of a VAE: float16 `[b, 2, c, h, w]`.

    Args:
        shape: c, h, w.
        flipped: whether payloads include the flipped image's latents.
        transform: chooses between image and flipped image; without it, the image is read.
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
        shape = (len(payloads), *self.shape)
        joined = np.concatenate(payloads) if payloads else np.empty(0, np.uint8)
        views = joined.view("<f2").reshape(shape).astype(np.float16, copy=False)
        finite = np.isfinite(views).all(axis=(1, 2, 3, 4, 5))
        refused = {int(row): NOT_FINITE for row in np.flatnonzero(~finite)}
        which = np.zeros(len(payloads), np.int64)
        if self._transform is not None and self.shape[0] == 2:
            which = self._transform.flips(positions).astype(np.int64)
        return views[np.arange(len(payloads)), which], refused


class FramesCodec(Codec):
    """Spectrogram frames: float16 `[b, n, d]`.

    Args:
        shape: n and d.
    """

    suffix = "frm"

    def __init__(self, shape: tuple[int, int]) -> None:
        self.shape = shape
        self.num_bytes = 2 * shape[0] * shape[1]

    def encode(self, frames: np.ndarray) -> bytes:
        """Encode `[n, d]`.

        Raises:
            ValueError: a value is not finite in float16 (at most 65,504), or the shape is wrong.
        """
        with np.errstate(over="ignore"):  # overflow is detected below
            half = frames.reshape(self.shape).astype("<f2")
        if not np.isfinite(half).all():
            raise ValueError("frames must be finite in float16")
        return half.tobytes()

    def decode(self, payloads: Payloads, positions: np.ndarray) -> tuple[np.ndarray, Refusals]:
        """Decode to float16 `[b, n, d]`."""
        joined = np.concatenate(payloads) if payloads else np.empty(0, np.uint8)
        frames = joined.view("<f2").reshape(len(payloads), *self.shape)
        frames = frames.astype(np.float16, copy=False)
        finite = np.isfinite(frames).all(axis=(1, 2))
        return frames, {int(row): NOT_FINITE for row in np.flatnonzero(~finite)}
