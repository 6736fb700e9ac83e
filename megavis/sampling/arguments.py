"""Types and ranges of the arguments of the Python API (`megavis.notebook`)."""

from __future__ import annotations

from numbers import Integral, Real
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megavis.config.errors import UserError
from megavis.config.schema import ObjectiveConfig

_NUM_SEEDS = 2**64


def check_rows(name: str, numbers: Tensor, count: int) -> None:
    """Raise UserError unless an argument has a whole number for each of `count` images."""
    if numbers.shape != (count,) or numbers.is_floating_point() or numbers.dtype == torch.bool:
        raise UserError(f"{name} must be whole numbers [{count}], one for each image")


def check_index(index: Tensor, count: int) -> None:
    """Raise UserError unless `index` has a position of the sample stream for each image."""
    check_rows("sample_index", index, count)
    if int(index.min()) < 0:
        raise UserError(f"sample_index must be 0 or more, not {int(index.min())}")


def check_sides(images: Tensor, own: torch.Size, autoencoder: ObjectiveConfig) -> None:
    """Raise UserError unless an autoencoder takes images of this shape; `own`: that of training."""
    *_, height, width, channels = own
    sides, wanted = images.shape[-3:-1], f"[b, {height}, {width}, {channels}]"
    if hasattr(autoencoder, "patch_size"):
        fits = sides == (height, width)  # Its patches have learned positions.
    else:
        # Convolutions take images of other sizes too.
        step = getattr(autoencoder, "downsampling", 1)
        wanted = f"{wanted}, or other multiples of {step}"
        fits = not any(each % step for each in sides)
    if images.ndim < 4 or images.shape[-1] != channels or not fits:
        raise UserError(f"the inputs have shape {list(images.shape)}, not {wanted}")


def is_whole(number: Any) -> bool:
    """Return whether this is an integer, of NumPy too, and no bool."""
    return isinstance(number, Integral) and not isinstance(number, bool)


def is_real(number: Any) -> bool:
    """Return whether this is a number, of NumPy too, and no bool."""
    return isinstance(number, Real) and not isinstance(number, bool)


def checked_seed(seed: Any, name: str = "seed") -> int:
    """Return a seed in the range of the config's; raise UserError for anything else."""
    if not is_whole(seed) or not 0 <= seed < _NUM_SEEDS:
        raise UserError(f"{name} must be a whole number from 0 to 2⁶⁴ - 1, not {seed!r}")
    return int(seed)


def as_tensor(inputs: Any, name: str = "the inputs") -> Tensor:
    """Return numbers as a tensor, which shares their memory if it can.

    Args:
        name: of the argument, for the message.

    Raises:
        UserError: they are no array of numbers.
    """
    form = ", for images uint8 [b, h, w, 3]" if name == "the inputs" else ""
    wanted = f"{name}: expected an array of numbers{form}, not {type(inputs).__name__}"
    if isinstance(inputs, Tensor):
        if not inputs.ndim or inputs.is_complex():
            raise UserError(f"{wanted} of shape {list(inputs.shape)} and type {inputs.dtype}")
        return inputs
    try:
        array = np.asarray(inputs)
    except ValueError as error:
        raise UserError(f"{name} are no array: {error}") from None
    if array.dtype.kind not in "biuf" or not array.ndim:
        raise UserError(f"{wanted} {inputs!r}")
    # torch supports no negative strides, and warns of read-only memory.
    if not array.flags.writeable or min(array.strides, default=0) < 0:
        array = array.copy()
    return torch.from_numpy(array)
