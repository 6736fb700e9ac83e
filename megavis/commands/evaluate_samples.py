"""`megavis evaluate samples` and `evaluate statistics`: compare generated with real images."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megavis.commands.feature_arguments import (
    add_image_file_arguments,
    add_network_arguments,
    collect_features,
    device_of,
    say,
)
from megavis.config.arguments import non_negative
from megavis.config.errors import UserError

if TYPE_CHECKING:
    from megavis.evaluation.images.feature_networks import FeatureNetwork
    from megavis.evaluation.images.generation import FeatureSummary


def add_samples(verbs: Any) -> None:
    """Add both to the verbs of `megavis evaluate`."""
    samples = verbs.add_parser(
        "samples",
        help="FID, inception score, precision and recall of generated images",
        description="Compare generated images with real ones: Fréchet distance, inception score"
        " (10 splits, in the order of the images), precision and recall (3 neighbours), and sFID."
        " The numbers lie next to the samples as JSON; of a run, in RUN/evaluation/samples.json.",
        epilog="example: megavis evaluate samples samples.npz --reference"
        " VIRTUAL_imagenet256_labeled.npz --inception"
        " weights-inception-2015-12-05-6726825d.pth",
    )
    samples.add_argument(
        "samples",
        metavar="SAMPLES",
        type=Path,
        help="an .npz of uint8 [N, H, W, 3] in arr_0, a folder of PNG or JPEG files, or a run"
        " folder, whose newest .npz in RUN/samples is taken",
    )
    samples.add_argument(
        "--reference",
        required=True,
        type=Path,
        metavar="FILE",
        help="statistics, of `megavis evaluate statistics`, ADM or pytorch-fid, or real images: an"
        " .npz, a folder, or jpeg or palette shards",
    )
    samples.add_argument("--out", type=Path, metavar="FILE", help="JSON file of the numbers")
    add_network_arguments(samples)
    add_image_file_arguments(samples)
    samples.set_defaults(run=evaluate_samples)
    statistics = verbs.add_parser(
        "statistics",
        help="statistics of real images, to compare with later",
        description="Write mean and covariance of the features of real images, and the features of"
        " some, to a file that `megavis evaluate samples --reference` takes.",
        epilog="example: megavis evaluate statistics shards/train --out reference.npz --inception"
        " weights-inception-2015-12-05-6726825d.pth",
    )
    statistics.add_argument(
        "images", metavar="IMAGES", type=Path, help="an .npz, a folder, or jpeg or palette shards"
    )
    statistics.add_argument("--out", required=True, type=Path, metavar="FILE", help=".npz file")
    statistics.add_argument(
        "--features",
        type=non_negative,
        default=10_000,
        help="of so many images, for precision and recall",
    )
    add_network_arguments(statistics)
    add_image_file_arguments(statistics)
    statistics.set_defaults(run=write_reference)


def evaluate_samples(args: argparse.Namespace) -> int:
    """Measure, say and write.

    Raises:
        UserError: images, reference or network cannot be used.
    """
    from megavis.data.format.files import write_atomically
    from megavis.evaluation.images.feature_networks import open_network
    from megavis.evaluation.images.generation import MANIFOLD_COUNT, compare
    from megavis.evaluation.images.image_files import open_images

    device = device_of(args)
    file = samples_of(args.samples)
    images = open_images(file, image_size=args.image_size if file.is_dir() else None)
    network = open_network(args.inception, args.network, device)
    reference = _reference(args, network)
    samples = collect_features(
        images, network, args, num_images=args.num_images, num_kept=MANIFOLD_COUNT
    )
    result = compare(samples, reference, device=device)
    say(result.line, result.caution)
    out = args.out or default_output(args.samples, file, "samples")
    out.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(out, (json.dumps(result.record(), indent=2) + "\n").encode())
    sys.stdout.write(f"{out}\n")
    return 0


def write_reference(args: argparse.Namespace) -> int:
    """Look at real images and write their statistics.

    Raises:
        UserError: images or network cannot be used.
    """
    from megavis.evaluation.images.feature_networks import open_network
    from megavis.evaluation.images.image_files import open_images
    from megavis.evaluation.images.statistics_files import write_statistics

    if args.out.suffix != ".npz":
        raise UserError(f"--out {args.out}: the name of a file of statistics ends in .npz")
    images = open_images(args.images, image_size=args.image_size)
    network = open_network(args.inception, args.network, device_of(args))
    summary = collect_features(
        images, network, args, num_images=args.num_images, num_kept=args.features
    )
    write_statistics(args.out, summary)
    sys.stdout.write(
        f"{args.out}: N {summary.num_images} of {summary.source} {summary.sha256[:8]}, network"
        f" {network.about}, resize {network.about.resize}\n"
    )
    return 0


def samples_of(path: Path) -> Path:
    """Return the images that are meant: of a run folder its newest `.npz` of samples.

    Raises:
        UserError: the run has drawn none.
    """
    if not (path / "config.yaml").exists():
        return path
    files = sorted(path.glob("samples/*.npz"), key=lambda file: file.stat().st_mtime)
    if not files:
        raise UserError(
            f"{path} has no samples; draw some: megavis sample {path} --num-images 50000 --npz"
            f" {path / 'samples' / 'images.npz'}"
        )
    return files[-1]


def default_output(given: Path, file: Path, name: str) -> Path:
    """Return where the numbers `name` of the samples in `file` go; `given` may be their run."""
    if given != file:
        return given / "evaluation" / f"{name}.json"
    kind = "evaluation" if name == "samples" else name
    return file.with_name(f"{file.name}.{kind}.json")


def _reference(args: argparse.Namespace, network: FeatureNetwork) -> FeatureSummary:
    """Read statistics, or look at the images; at both where a file of ADM's holds both."""
    from dataclasses import replace

    from megavis.evaluation.images.generation import MANIFOLD_COUNT
    from megavis.evaluation.images.image_files import NpzImages, holds_images, open_images
    from megavis.evaluation.images.statistics_files import holds_statistics, read_statistics

    path: Path = args.reference
    if not holds_statistics(path):
        size = args.image_size if path.is_dir() else None
        return collect_features(
            open_images(path, image_size=size), network, args, num_kept=MANIFOLD_COUNT
        )
    statistics = read_statistics(path)
    if statistics.features is not None or not holds_images(path):
        return statistics
    seen = collect_features(NpzImages(path), network, args, num_kept=MANIFOLD_COUNT)
    return replace(statistics, features=seen.features)
