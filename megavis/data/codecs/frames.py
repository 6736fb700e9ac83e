"""Shards of spectrograms: fixed-width frames in sequence.

The `.frm` payload is float16, `[n, d]`, little-endian.

Legend: b samples, n frames of each, d numbers of a frame.
"""

from __future__ import annotations

import numpy as np

from megavis.data.codecs.base import Codec, Payloads, Refusals
from megavis.data.codecs.latents import NOT_FINITE


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
