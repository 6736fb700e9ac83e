"""Convert one second of sound to 100 frames of 40 mel-frequency cepstral coefficients.

Windows of 30 ms, one every 10 ms, mel bands and logarithm as in TC-ResNet's released code
("Temporal Convolution for Real-time Keyword Spotting on Mobile Devices", Choi et al., 2019): 64
bands from 80 to 7600 Hz on HTK's scale, ln(power + 1e-6).
"""

from __future__ import annotations

import io
import warnings
from importlib.metadata import version

import numpy as np

from data_tools.decode import RefusedImageError
from megavis.config.errors import UserError

SAMPLE_RATE = 16_000
NUM_FRAMES, NUM_COEFFICIENTS = 100, 40
_HOP, _WINDOW, _TRANSFORM = 160, 480, 512
# Each window is centered on its 10 ms.
_BORDER = (_TRANSFORM - _HOP) // 2
_BANDS, _LOWEST, _HIGHEST, _OFFSET = 64, 80.0, 7600.0, 1e-6
DESCRIPTION = f"{NUM_COEFFICIENTS} MFCCs of {_BANDS} mel bands, 30 ms every 10 ms"


def versions() -> dict[str, str]:
    """Return the versions of the packages that affect the coefficients."""
    return {package: version(package) for package in ("librosa", "scipy")}


def need_librosa() -> None:
    """Raise UserError if librosa is not installed."""
    try:
        version("librosa")
    except ModuleNotFoundError:
        raise UserError(
            "cepstral coefficients need librosa: pip install 'megavis[speech]'"
        ) from None


def read_wav(content: bytes) -> np.ndarray:
    """Read the samples of a mono WAV file, float32 in [-1, 1].

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
    return samples.astype(np.float32) / 32768.0


def one_second(samples: np.ndarray) -> np.ndarray:
    """Return the first second, float32 `[16000]`, padded with silence."""
    first = samples[:SAMPLE_RATE]
    return np.pad(first, (0, SAMPLE_RATE - len(first)))


def cepstra(samples: np.ndarray) -> np.ndarray:
    """Map one second, float32 `[16000]`, to coefficients, float32 `[100, 40]`."""
    import librosa

    power = librosa.feature.melspectrogram(
        y=np.pad(samples, _BORDER),
        sr=SAMPLE_RATE,
        n_fft=_TRANSFORM,
        win_length=_WINDOW,
        hop_length=_HOP,
        center=False,
        n_mels=_BANDS,
        fmin=_LOWEST,
        fmax=_HIGHEST,
        htk=True,
        norm=None,
    )
    coefficients = librosa.feature.mfcc(S=np.log(power + _OFFSET), n_mfcc=NUM_COEFFICIENTS)
    return np.ascontiguousarray(coefficients.T, dtype=np.float32)
