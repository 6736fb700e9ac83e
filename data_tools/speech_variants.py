"""A recording moved in time and mixed with background noise, as TC-ResNet's released code does.

"Temporal Convolution for Real-time Keyword Spotting on Mobile Devices" (Choi et al., 2019), method
`anchored_slice_or_pad_with_shift`: a second is moved by up to 100 ms either way, zeros move in;
into four of five a random second of a random noise is mixed, at a volume of up to 0.1.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from data_tools.cepstra import SAMPLE_RATE, read_wav
from data_tools.decode import RefusedImageError
from megavis.config.errors import UserError

VARIANTS = "moved by up to 100 ms, noise of volume up to 0.1 mixed into 80 %"
_LARGEST_SHIFT = SAMPLE_RATE // 10
_SHARE, _LARGEST_VOLUME = 0.8, 0.1


@functools.lru_cache(maxsize=1)
def read_noises(folder: Path) -> Sequence[np.ndarray]:
    """Return the recordings of a folder that last a second or more, float32 `[n]` in [-1, 1].

    Raises:
        UserError: there is none.
    """
    noises = []
    for path in sorted(folder.glob("*.wav")):
        try:
            noises.append(read_wav(path.read_bytes()))
        except RefusedImageError as refusal:
            raise UserError(f"{path}: {refusal}") from None
    long = [noise for noise in noises if len(noise) >= SAMPLE_RATE]
    if not long:
        raise UserError(f"{folder} holds no recording of a second or more, which are mixed in")
    return long


def vary(
    second: np.ndarray, noises: Sequence[np.ndarray], random: np.random.Generator
) -> np.ndarray:
    """Return one second `[16000]`, moved and mixed.

    Args:
        second: float32 `[16000]` in [-1, 1].
        noises: each of a second or more.
        random: draws shift, noise, its place and its volume.
    """
    moved = move(second, int(random.integers(-_LARGEST_SHIFT, _LARGEST_SHIFT)))
    noise = noises[int(random.integers(len(noises)))]
    start = int(random.integers(0, len(noise) - SAMPLE_RATE, endpoint=True))
    volume = random.uniform(0.0, _LARGEST_VOLUME) if random.random() < _SHARE else 0.0
    mixed = moved + volume * noise[start : start + SAMPLE_RATE]
    return mixed.clip(-1.0, 1.0).astype(np.float32)


def move(second: np.ndarray, shift: int) -> np.ndarray:
    """Return samples `[n]` so many places later, or earlier; zeros move in."""
    moved = np.zeros_like(second)
    if shift >= 0:
        moved[shift:] = second[: len(second) - shift]
    else:
        moved[:shift] = second[-shift:]
    return moved
