"""Spectrograms as sequences of frames; no parameters.

Legend: b recordings, n frames, d numbers of a frame (for example cepstral coefficients).
"""

from __future__ import annotations

from torch import Tensor

_EPSILON = 1e-5


def standardize_frames(frames: Tensor) -> Tensor:
    """Give each of the d numbers mean 0 and deviation 1 over the frames of a recording.

    Cepstral mean and variance normalisation: it takes away loudness, and the colouring that
    microphone and room give to all frames alike.

    Args:
        frames: float `[b, n, d]`.

    Returns:
        float32 `[b, n, d]`; zeros where a number is the same in all frames.
    """
    wide = frames.float()
    centred = wide - wide.mean(1, keepdim=True)
    variance = centred.square().mean(1, keepdim=True)
    return centred / (variance + _EPSILON).sqrt()
