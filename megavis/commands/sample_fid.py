"""How far what a run draws lies from real images: a measure of `megavis evaluate watch`."""

from __future__ import annotations

import argparse
import hashlib
from pathlib import Path
from typing import TYPE_CHECKING

from megavis.commands.feature_arguments import add_network_arguments, device_of
from megavis.config.arguments import positive
from megavis.config.errors import UserError

if TYPE_CHECKING:
    from megavis.evaluation.images.generation import ImageSetComparison
    from megavis.notebook import Run

MEASURE = "frechet"
_BATCH_SIZE = 64


def add_distance_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what drawn images are compared with, and how many are."""
    parser.add_argument(
        "--reference",
        type=Path,
        metavar="FILE",
        help=f"for {MEASURE}: statistics of real images, of `megavis evaluate statistics`, ADM or"
        " pytorch-fid",
    )
    parser.add_argument(
        "--num-samples",
        type=positive,
        default=1000,
        help=f"for {MEASURE}: images that are drawn of each checkpoint",
    )
    add_network_arguments(parser)


class SampleFID:
    """The network and the statistics, opened once for all checkpoints.

    Args:
        args: with what `add_distance_arguments` adds, `device`, and `seed` of the draws.

    Raises:
        UserError: an option is missing, or a file is not what it should be.
    """

    def __init__(self, args: argparse.Namespace) -> None:
        from megavis.evaluation.images.feature_networks import open_network
        from megavis.evaluation.images.statistics_files import read_statistics

        if args.reference is None or args.num_samples < 2:
            raise UserError(
                f"--what {MEASURE} wants --reference FILE (`megavis evaluate statistics` writes"
                " one), and --num-samples of 2 or more"
            )
        self._num_images, self._seed = args.num_samples, args.seed
        self._device = device_of(args)
        self._network = open_network(args.inception, args.network, self._device)
        self._reference = read_statistics(args.reference)

    def measure(self, opened: Run) -> ImageSetComparison:
        """Draw images as `megavis sample RUN` does where nothing else is said, and compare them.

        Raises:
            UserError: the run draws no images from nothing, or the statistics are of another
                network.
        """
        import torch

        from megavis.evaluation.images.generation import FeatureCollector, compare

        sampler = opened.sampler(seed=self._seed)
        # Precision and recall would want tens of thousands.
        collector = FeatureCollector(self._network, num_images=self._num_images, num_kept=0)
        digest = hashlib.sha256()
        for numbers in torch.arange(self._num_images).split(_BATCH_SIZE):
            images = sampler.from_nothing(numbers).cpu()
            digest.update(images.numpy().tobytes())
            collector.add(images)
        summary = collector.summary(
            source=f"{opened.config.name} at step {opened.step}, seed {self._seed}",
            sha256=digest.hexdigest(),
        )
        return compare(summary, self._reference, device=self._device)
