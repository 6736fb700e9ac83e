"""Augmentation of recordings: a shift, and background noise.

As in TC-ResNet's released code ("Temporal Convolution for Real-time Keyword Spotting on Mobile
Devices", Choi et al., 2019; method `anchored_slice_or_pad_with_shift`): a recording is shifted by
up to 100 ms with zero padding, and in four of five a random part of a noise is mixed in at a volume
of up to 0.1.

Random numbers are arguments, so every rank, worker and resumed run gets the same samples.

Legend: t samples of a recording.
"""

from __future__ import annotations

import io
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from megavis.config.errors import UserError
from megavis.data.codecs.cepstra import SAMPLE_RATE
from megavis.data.format.files import write_atomically

FULL_SCALE = 32768.0
"""Amplitude 1 as an int16 sample."""
NUM_SOUND_DRAWS = 5
"""Uniform draws per recording."""
_SHARE, _LARGEST_VOLUME = 0.8, 0.1
"""Of the noise: share of recordings that it is mixed into, and largest volume."""


@dataclass(frozen=True, eq=False)
class SoundAugment:
    """Shift a recording and mix noise into it.

    Attributes:
        largest_shift: in samples.
        noises: int16 arrays, none shorter than a recording; none to mix no noise.
    """

    largest_shift: int
    noises: Sequence[np.ndarray] = ()

    def __call__(self, samples: np.ndarray, draws: np.ndarray) -> np.ndarray:
        """Augment one recording.

        Args:
            samples: float32 `[t]` in [-1, 1].
            draws: `[NUM_SOUND_DRAWS]` in [0, 1): shift, which noise, its first sample, whether it
                is mixed in, its volume.

        Returns:
            float32 `[t]` in [-1, 1].
        """
        shift, which, start, whether, volume = draws.tolist()
        moved = move(samples, int(2 * self.largest_shift * shift) - self.largest_shift)
        if not self.noises or whether >= _SHARE:
            return moved
        noise = self.noises[int(which * len(self.noises))]
        first = int(start * (len(noise) - len(samples) + 1))
        scale = np.float32(_LARGEST_VOLUME * volume / FULL_SCALE)
        return (moved + scale * noise[first : first + len(samples)]).clip(-1.0, 1.0)


def move(samples: np.ndarray, shift: int) -> np.ndarray:
    """Shift samples `[t]` with zero padding, to the right if `shift` is positive."""
    moved = np.zeros_like(samples)
    if shift >= 0:
        moved[shift:] = samples[: len(samples) - shift]
    else:
        moved[:shift] = samples[-shift:]
    return moved


def sound_augment(time_shift: float, noise: str | None, *, num_samples: int) -> SoundAugment | None:
    """Return the augmentation of recordings of `num_samples`, or None if nothing is changed.

    Args:
        time_shift: largest shift in seconds.
        noise: file of noises (`write_noises`), if any is mixed in.
        num_samples: of a recording.

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
    except (OSError, ValueError, EOFError, AttributeError, TypeError, zipfile.BadZipFile):
        raise UserError(
            f"{path} is missing or no file of noises: `python -m data_tools speech` writes one"
        ) from None
    if not noises or any(
        noise.dtype != np.int16 or noise.ndim != 1 or len(noise) < num_samples for noise in noises
    ):
        raise UserError(
            f"{path} must hold noises of 16 bits, each of {num_samples} samples or more"
        )
    return noises
