"""`megavis features`: what a run folder keeps of its networks' features; how to be rid of it."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING, Any

from megavis.commands.arguments import add_run

if TYPE_CHECKING:
    from megavis.evaluation.feature_cache import CachedFile


def add_parser(subparsers: Any) -> None:
    """Add the command to the parser."""
    parser = subparsers.add_parser(
        "features",
        help="list the features that a run folder keeps, or delete them",
        description="List the features that `megavis probe` and `megavis figure` have computed and"
        " kept in RUN/evaluation/features: of which weights, in which precision, how many images."
        " Nothing there is needed: what is asked for again is computed again.",
        epilog="example: megavis features runs/igpt_demo --clear",
    )
    add_run(parser)
    parser.add_argument("--clear", action="store_true", help="delete them all")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """List or delete.

    Raises:
        UserError: there is no such run.
    """
    from megavis.commands.quiet import quietly

    with quietly():
        from megavis.checkpoint.format.folder import require_run_folder
        from megavis.evaluation.feature_cache import cached_features, clear_features

    require_run_folder(args.run_folder)
    if args.clear:
        sys.stdout.write(f"deleted {clear_features(args.run_folder) / 1e6:.1f} MB\n")
        return 0
    files = cached_features(args.run_folder)
    for file in files:
        sys.stdout.write(f"{file.path.name}  {_words(file)}\n")
    total = sum(file.path.stat().st_size for file in files)
    sys.stdout.write(f"{len(files)} files, {total / 1e6:.1f} MB\n")
    return 0


def _words(file: CachedFile) -> str:
    if file.key is None:
        return "damaged"
    layers, images, width = file.shape
    weights = file.key["weights"]
    network = f"fresh weights of seed {file.key['seed']}"
    if weights != "fresh":
        network = f"weights {weights[:12]}"
    view = f", view {file.key['view']}" if file.key["view"] else ""
    return (
        f"{network}, {file.key['precision']}, shards {file.key['shards'][:12]}{view}:"
        f" {images} images, {layers} layers of {width}"
    )
