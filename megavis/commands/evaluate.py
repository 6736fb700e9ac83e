"""`megavis evaluate`: what a run's images are worth, in the field's numbers."""

from __future__ import annotations

import argparse
from typing import Any

from megavis.commands.evaluate_reconstruction import add_reconstruction


def add_parser(subparsers: Any) -> None:
    """Add the command and its verbs, a file each, to the parser."""
    parser = subparsers.add_parser(
        "evaluate",
        help="how good reconstructed images are",
        description="Measure images that a run has made.",
        epilog="example: megavis evaluate reconstruction runs/vae",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="VERB")
    add_reconstruction(verbs)
