"""Check that a converted network matches the original on random inputs."""

from __future__ import annotations

from torch import Tensor

from megavis.config.errors import UserError

TOLERANCE = 1e-4


def check_agreement(ours: Tensor, theirs: Tensor) -> float:
    """Return the maximum absolute difference of two networks' outputs of equal shape.

    Raises:
        UserError: it exceeds 1e-4.
    """
    difference = float((ours - theirs).abs().max())
    if not difference <= TOLERANCE:
        raise UserError(
            f"the converted network's outputs differ by {difference:.1e} from the original's on"
            f" random inputs, more than {TOLERANCE:.0e}; the result was discarded"
        )
    return difference
