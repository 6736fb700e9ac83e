"""Read WAV files of Speech Commands: 16 kHz, one channel, 16 bits."""

from __future__ import annotations

import io
import warnings

import numpy as np

from data_tools.decode import RefusedImageError
from megavis.data.codecs.cepstra import SAMPLE_RATE


def read_wav(content: bytes) -> np.ndarray:
    """Read the samples of a mono WAV file, int16 `[t]`.

    Raises:
        RefusedImageError: it is not such a file, or its rate is not 16 kHz.
    """
    from scipy.io import wavfile

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", wavfile.WavFileWarning)  # truncated files
            rate, samples = wavfile.read(io.BytesIO(content))
    except Exception:
        # The reader raises almost any exception on damaged bytes: struct.error, ValueError, ...
        raise RefusedImageError("no WAV file, or a damaged one") from None
    if rate != SAMPLE_RATE:
        raise RefusedImageError(f"{rate} Hz, not {SAMPLE_RATE}")
    if samples.ndim != 1 or samples.dtype != np.int16:
        raise RefusedImageError("not one channel of 16 bits")
    return samples


def one_second(samples: np.ndarray) -> np.ndarray:
    """Return the first second, int16 `[16000]`, padded with silence."""
    first = samples[:SAMPLE_RATE]
    return np.pad(first, (0, SAMPLE_RATE - len(first)))
