"""Codecs for VAE latents, little-endian float16, and for recordings, little-endian int16.

A `.lat` payload holds the posterior's mean, then its scale, each `[c, h, w]`; if the flipped image
is stored too, its mean and scale follow. Training samples from the posterior at every read. A
`.pcm` payload holds the 160 n samples of a recording at 16 kHz.

Legend: b samples, c channels, h and w of the latent grid, n frames, d coefficients per frame.
"""

from __future__ import annotations

import numpy as np

from megavis.data.codecs.cepstra import HOP, cepstra
from megavis.data.codecs.codec import Codec, Payloads, Refusals
from megavis.data.codecs.sound import FULL_SCALE
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


class RecordingsCodec(Codec):
    """Recordings, read as cepstral coefficients (`cepstra.py`): float32 `[b, n, d]`.

    Args:
        shape: n and d.
        transform: shifts recordings and mixes in noise, if it augments sound.
    """

    suffix = "pcm"

    def __init__(self, shape: tuple[int, int], transform: Transform | None = None) -> None:
        self.shape = shape
        self.num_samples = HOP * shape[0]
        self.num_bytes = 2 * self.num_samples
        self._transform = transform

    def encode(self, samples: np.ndarray) -> bytes:
        """Encode int16 `[160 n]`. Raises ValueError for another dtype or length."""
        if samples.dtype != np.int16 or samples.shape != (self.num_samples,):
            raise ValueError(f"a recording must be int16 [{self.num_samples}]")
        return samples.astype("<i2").tobytes()

    def decode(self, payloads: Payloads, positions: np.ndarray) -> tuple[np.ndarray, Refusals]:
        """Decode to float32 `[b, n, d]`; refuses nothing."""
        frames = np.empty((len(payloads), *self.shape), np.float32)
        augment = self._transform.sound if self._transform else None
        draws = self._transform.sound_draws(positions) if self._transform and augment else None
        # One at a time: sums then round the same in a batch of any size.
        for row, payload in enumerate(payloads):
            samples = payload.view("<i2").astype(np.float32) / np.float32(FULL_SCALE)
            if augment is not None and draws is not None:
                samples = augment(samples, draws[row])
            frames[row] = cepstra(samples, self.shape[1])
        return frames, {}
