"""The options that name a perceptual distance, shared by commands that measure it."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from megavis.config.errors import UserError

if TYPE_CHECKING:
    from megavis.model.perceptual import PerceptualDistance


def add_perceptual_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the user's files of a perceptual distance."""
    parser.add_argument(
        "--perceptual-weights",
        metavar="FILE",
        help="VGG-16 or AlexNet weights; the distance in its features is measured too",
    )
    parser.add_argument(
        "--lpips-weights",
        metavar="FILE",
        help="linear weights of the same network, as the package lpips has them; with"
        " --perceptual-weights, LPIPS is measured",
    )


def open_perceptual(args: argparse.Namespace) -> PerceptualDistance | None:
    """Open the distance that the options name; None where they name none.

    Raises:
        UserError: a file is missing or is none of weights.
    """
    from megavis.model.perceptual import PerceptualDistance

    if args.perceptual_weights is None:
        if args.lpips_weights:
            raise UserError("--lpips-weights needs the network's own in --perceptual-weights")
        return None
    return PerceptualDistance.load(args.perceptual_weights, args.lpips_weights)
