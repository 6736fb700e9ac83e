"""The codec of recordings: the 160 n samples of one at 16 kHz, little-endian int16, as `.pcm`.

Legend: b recordings of n frames, each of d coefficients.
"""

from __future__ import annotations

import numpy as np

from megavis.data.codecs.codec import Codec, Payloads, Refusals
from megavis.data.codecs.sound import FULL_SCALE, HOP, NUM_SOUND_DRAWS, cepstra
from megavis.data.codecs.transforms import Transform


class RecordingsCodec(Codec):
    """Recordings, read as cepstral coefficients (`sound.py`): float32 `[b, n, d]`.

    Args:
        shape: n and d.
        transform: shifts recordings and mixes in noise, if it augments sound.
    """

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
        draws = (
            self._transform.sound_draws(positions, NUM_SOUND_DRAWS)
            if self._transform and augment
            else None
        )
        # One at a time: sums then round the same in a batch of any size.
        for row, payload in enumerate(payloads):
            samples = payload.view("<i2").astype(np.float32) / np.float32(FULL_SCALE)
            if augment is not None and draws is not None:
                samples = augment(samples, draws[row])
            frames[row] = cepstra(samples, self.shape[1])
        return frames, {}
