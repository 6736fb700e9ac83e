"""`megavis evaluate`: what a run's images are worth, in the field's numbers."""

from __future__ import annotations

from typing import Any

from megavis.commands.evaluate_classes import add_classes
from megavis.commands.evaluate_reconstruction import add_reconstruction
from megavis.commands.evaluate_samples import add_samples
from megavis.commands.evaluate_watch import add_watch


def add_parser(subparsers: Any) -> None:
    """Add the command and its verbs, a file each, to the parser."""
    parser = subparsers.add_parser(
        "evaluate",
        help="how good images are that a run made (FID, SSIM, ...), and each checkpoint of a run",
        description="Measure images that a run has drawn or reconstructed, or each checkpoint of a"
        " run as it appears.",
        epilog="example: megavis evaluate samples samples.npz --reference statistics.npz"
        " --inception weights.pth",
    )
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="VERB")
    add_samples(verbs)
    add_classes(verbs)
    add_reconstruction(verbs)
    add_watch(verbs)
