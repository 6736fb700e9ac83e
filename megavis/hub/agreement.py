"""Check that a converted network computes what the original does, on random input."""

from __future__ import annotations

from torch import Tensor

from megavis.config.errors import UserError

TOLERANCE = 1e-4


def check_agreement(ours: Tensor, theirs: Tensor) -> float:
    """Return the largest difference of two networks' outputs, of equal shapes.

    Raises:
        UserError: when it is above 1e-4.
    """
    difference = float((ours - theirs).abs().max())
    if not difference <= TOLERANCE:
        raise UserError(
            f"the converted network's outputs differ by {difference:.1e} from the original's on"
            f" random input, more than {TOLERANCE:.0e}; nothing was kept"
        )
    return difference
