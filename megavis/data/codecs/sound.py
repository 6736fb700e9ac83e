"""Recordings: their codec, mel-frequency cepstral coefficients, and augmentation.

As in TC-ResNet's released code ("Temporal Convolution for Real-time Keyword Spotting on Mobile
Devices", Choi et al., 2019), which calls TensorFlow. 40 coefficients per 10 ms in the papers:
windows of 30 ms, one every 10 ms, 64 mel bands from 80 to 7600 Hz, triangles on HTK's mel scale
(`tf.signal.linear_to_mel_weight_matrix`), ln(power + 1e-6), and a cosine transform that scales all
coefficients, including the first, by √(2 / 64) (`tf.signal.mfccs_from_log_mel_spectrograms`).
TensorFlow has 98 windows in a second; here one more begins before it and one ends after it, filled
with silence, so that every 10 ms are at the center of a window.

A recording is shifted by up to 100 ms with zero padding, and in four of five a random part of a
noise is mixed in at a volume of up to 0.1 (method `anchored_slice_or_pad_with_shift`).

Random numbers are arguments, so every rank, worker and resumed run gets the same samples.

Legend: b recordings, n frames, d coefficients per frame, t = 160 n samples of a recording.
"""

from __future__ import annotations

import functools
import io
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from scipy import fft

from megavis.config.errors import UserError, describe_os_error
from megavis.data.codecs.codec import Codec, Payloads, Refusals
from megavis.data.codecs.transforms import Transform
from megavis.data.format.files import write_atomically

SAMPLE_RATE = 16_000
HOP = 160
"""Samples per frame."""
NUM_BANDS = 64
_WINDOW, _TRANSFORM = 480, 512
_LOWEST, _HIGHEST, _OFFSET = 80.0, 7600.0, 1e-6
FULL_SCALE = 32768.0
"""Amplitude 1 as an int16 sample."""
NUM_SOUND_DRAWS = 5
"""Uniform draws per recording."""
_SHARE, _LARGEST_VOLUME = 0.8, 0.1
"""Share of recordings that noise is mixed into, and its largest volume."""


def cepstra(samples: np.ndarray, count: int) -> np.ndarray:
    """Map samples float32 `[t]` in [-1, 1] to `count` coefficients, float32 `[n, count]`."""
    # Each window is centered on its 10 ms.
    padded = np.pad(samples, (_TRANSFORM - HOP) // 2)
    spectrum = fft.rfft(sliding_window_view(padded, _TRANSFORM)[::HOP] * _hann())
    power = spectrum.real**2 + spectrum.imag**2
    return np.log(power @ _mel_bands() + np.float32(_OFFSET)) @ _cosines(count)


@functools.cache
def _hann() -> np.ndarray:
    """Return the periodic Hann window, padded to the transform's length, float32 `[512]`."""
    window = 0.5 - 0.5 * np.cos(2.0 * np.pi * np.arange(_WINDOW) / _WINDOW)
    return np.pad(window, (_TRANSFORM - _WINDOW) // 2).astype(np.float32)


@functools.cache
def _mel_bands() -> np.ndarray:
    """Return filters that are triangles in mel, with a peak of 1, float32 `[257, 64]`."""
    low, high = _to_mel(_LOWEST), _to_mel(_HIGHEST)
    edges = np.linspace(low, high, NUM_BANDS + 2)
    mel = _to_mel(np.arange(_TRANSFORM // 2 + 1) * (SAMPLE_RATE / _TRANSFORM))[:, None]
    left, peak, right = edges[:-2], edges[1:-1], edges[2:]
    rise, fall = (mel - left) / (peak - left), (right - mel) / (right - peak)
    return np.minimum(rise, fall).clip(min=0.0).astype(np.float32)


def _to_mel(hertz: Any) -> Any:
    return 2595.0 * np.log10(1.0 + hertz / 700.0)


@functools.cache
def _cosines(count: int) -> np.ndarray:
    """Return the first `count` columns of the scaled DCT-II, float32 `[64, count]`."""
    angles = np.pi * np.outer(np.arange(NUM_BANDS) + 0.5, np.arange(count)) / NUM_BANDS
    return (np.sqrt(2.0 / NUM_BANDS) * np.cos(angles)).astype(np.float32)


@dataclass(frozen=True, eq=False)
class SoundAugment:
    """Shift a recording and mix noise into it.

    Attributes:
        largest_shift: largest shift in samples.
        noises: int16 arrays, none shorter than a recording; none to mix no noise.
    """

    largest_shift: int
    noises: Sequence[np.ndarray] = ()

    def __call__(self, samples: np.ndarray, draws: np.ndarray) -> np.ndarray:
        """Augment a recording, float32 `[t]` in [-1, 1].

        Draws `[NUM_SOUND_DRAWS]` in [0, 1) are shift, which noise, its first sample, whether it is
        mixed in, its volume.
        """
        shift, which, start, whether, volume = draws.tolist()
        moved = move(samples, int(2 * self.largest_shift * shift) - self.largest_shift)
        if not self.noises or whether >= _SHARE:
            return moved
        noise = self.noises[int(which * len(self.noises))]
        first = int(start * (len(noise) - len(samples) + 1))
        scale = np.float32(_LARGEST_VOLUME * volume / FULL_SCALE)
        return (moved + scale * noise[first : first + len(samples)]).clip(-1.0, 1.0)


class RecordingsCodec(Codec):
    """Recordings (`.pcm`, little-endian int16), read as cepstral coefficients: float32 `[b, n, d]`.

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


def move(samples: np.ndarray, shift: int) -> np.ndarray:
    """Shift samples `[t]` with zero padding, to the right if `shift` is positive."""
    moved = np.zeros_like(samples)
    if shift >= 0:
        moved[shift:] = samples[: len(samples) - shift]
    else:
        moved[:shift] = samples[-shift:]
    return moved


def sound_augment(time_shift: float, noise: str | None, *, num_samples: int) -> SoundAugment | None:
    """Return the augmentation of recordings, or None if there is none.

    Shifts are in seconds; `noise` is a file of `write_noises`.

    Raises:
        UserError: the file is missing or damaged, or a noise in it is too short.
    """
    if not time_shift and noise is None:
        return None
    noises = () if noise is None else _read_noises(Path(noise), num_samples)
    return SoundAugment(round(time_shift * SAMPLE_RATE), noises)


def write_noises(path: Path, noises: Sequence[np.ndarray]) -> None:
    """Write noises, int16 arrays, as an `.npz` file. Raises OSError."""
    file = io.BytesIO()
    np.savez(file, *noises)
    write_atomically(path, file.getvalue())


def _read_noises(path: Path, num_samples: int) -> Sequence[np.ndarray]:
    try:
        with np.load(path, allow_pickle=False) as file:
            noises = [file[name] for name in file.files]
    except PermissionError as error:
        raise UserError(describe_os_error(error)) from None
    except (OSError, ValueError, EOFError, AttributeError, TypeError, zipfile.BadZipFile):
        raise UserError(
            f"{path} is missing or not a file of noises: `python -m data_tools speech` writes one"
        ) from None
    if not noises or any(
        noise.dtype != np.int16 or noise.ndim != 1 or len(noise) < num_samples for noise in noises
    ):
        raise UserError(
            f"{path} must hold noises of 16 bits, each of {num_samples} samples or more"
        )
    return noises
