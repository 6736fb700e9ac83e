"""The options that name a feature network, and what it sees of images in files."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from megavis.commands.arguments import add_device
from megavis.config.arguments import positive

if TYPE_CHECKING:
    import torch

    from megavis.evaluation.images.feature_networks import FeatureNetwork
    from megavis.evaluation.images.generation import FeatureSummary
    from megavis.evaluation.images.image_files import Images


def add_network_arguments(parser: argparse.ArgumentParser) -> None:
    """Add which network looks at images."""
    parser.add_argument(
        "--inception",
        type=Path,
        metavar="FILE",
        help="weights of Inception, weights-inception-2015-12-05-6726825d.pth of torch-fidelity or"
        " pytorch-fid's file of the same weights: the published metrics",
    )
    parser.add_argument(
        "--network",
        choices=("efficientnet-lite0",),
        help="another network, which comes with the extra `evaluation`; its numbers compare with"
        " no published ones",
    )


def add_image_file_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what of the images is read, and where they are looked at."""
    parser.add_argument(
        "--num-images", type=positive, help="so many of them, evenly spread; default: all"
    )
    parser.add_argument(
        "--image-size",
        type=positive,
        help="of images in a folder: resize the shorter side to it and cut the middle; default: as"
        " they are",
    )
    parser.add_argument("--batch-size", type=positive, default=64, help="images at once")
    add_device(parser)


def device_of(args: argparse.Namespace) -> torch.device:
    """Return the device that the options name, or the machine's best, where float32 is exact.

    Raises:
        UserError: there is no GPU.
    """
    import torch

    from megavis.parallel.device import choose_device, set_arithmetic

    set_arithmetic(tf32=False, deterministic=False)
    # Without an index: in a job, the GPU of this process.
    return torch.device(choose_device(args.device, local_rank=0).type)


def collect_features(
    images: Images,
    network: FeatureNetwork,
    args: argparse.Namespace,
    *,
    num_images: int | None = None,
    num_kept: int,
) -> FeatureSummary:
    """Show images to the network, with a progress bar on a terminal.

    Args:
        images: in files.
        network: looks at them.
        args: the options; how many at once.
        num_images: so many, evenly spread; all where None.
        num_kept: feature vectors to keep, at most.

    Raises:
        UserError: an image cannot be read, or there are too few.
    """
    from tqdm import tqdm

    from megavis.evaluation.images.generation import FeatureCollector
    from megavis.evaluation.images.image_files import image_batches

    count = min(num_images or len(images), len(images))
    collector = FeatureCollector(network, num_images=count, num_kept=num_kept)
    with tqdm(total=count, desc=images.path.name, unit="image", disable=None) as progress:
        for batch in image_batches(images, num_images=count, batch_size=args.batch_size):
            collector.add(batch)
            progress.update(len(batch))
    return collector.summary(source=str(images.path), sha256=images.sha256)


def say(line: str, caution: str | None) -> None:
    """Write a line of numbers, and to standard error why to be careful with it."""
    sys.stdout.write(line + "\n")
    if caution is not None:
        sys.stderr.write(f"note: {caution}\n")
