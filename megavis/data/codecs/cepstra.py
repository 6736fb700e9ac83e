"""Mel-frequency cepstral coefficients of sound: 40 per 10 ms in the papers.

Windows of 30 ms, one every 10 ms, mel bands and logarithm as in TC-ResNet's released code
("Temporal Convolution for Real-time Keyword Spotting on Mobile Devices", Choi et al., 2019): 64
bands from 80 to 7600 Hz on HTK's scale, ln(power + 1e-6), and an orthonormal cosine transform.

Legend: n frames, d coefficients per frame, t = 160 n samples.
"""

from __future__ import annotations

import functools

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from scipy import fft

SAMPLE_RATE = 16_000
HOP = 160
"""Samples per frame."""
NUM_BANDS = 64
_WINDOW, _TRANSFORM = 480, 512
_LOWEST, _HIGHEST, _OFFSET = 80.0, 7600.0, 1e-6


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
    """Return triangular filters with a peak of 1, float32 `[257, 64]`."""
    low, high = (2595.0 * np.log10(1.0 + hertz / 700.0) for hertz in (_LOWEST, _HIGHEST))
    edges = 700.0 * (10.0 ** (np.linspace(low, high, NUM_BANDS + 2) / 2595.0) - 1.0)
    hertz = np.arange(_TRANSFORM // 2 + 1)[:, None] * (SAMPLE_RATE / _TRANSFORM)
    left, peak, right = edges[:-2], edges[1:-1], edges[2:]
    rise, fall = (hertz - left) / (peak - left), (right - hertz) / (right - peak)
    return np.minimum(rise, fall).clip(min=0.0).astype(np.float32)


@functools.cache
def _cosines(count: int) -> np.ndarray:
    """Return the first `count` columns of the orthonormal DCT-II, float32 `[64, count]`."""
    angles = np.pi * np.outer(np.arange(NUM_BANDS) + 0.5, np.arange(count)) / NUM_BANDS
    scale = np.where(np.arange(count) == 0, 1.0, 2.0) / NUM_BANDS
    return (np.sqrt(scale) * np.cos(angles)).astype(np.float32)
