"""`megavis features`: list or delete the cached features of a run."""

from __future__ import annotations

import argparse
import sys

from megavis.checkpoint.format.folder import require_run_folder
from megavis.evaluation.feature_cache import CachedFile, cached_features, clear_features


def run(args: argparse.Namespace) -> int:
    """List or delete.

    Raises:
        UserError: there is no such run.
    """
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
