"""Measures of a checkpoint for `megavis evaluate watch`, by name."""

from __future__ import annotations

import argparse
import functools
import hashlib
from collections.abc import Callable, Mapping

import numpy as np
import torch

from megavis.commands.evaluate_samples import device_of
from megavis.commands.networks import feature_cache, network_of, probe_data
from megavis.commands.opening import open_held_out
from megavis.commands.options.images import DISTANCE
from megavis.config.errors import UserError
from megavis.data.loading.dataset import ShardDataset
from megavis.data.loading.loader import read_in_turn
from megavis.evaluation.images.feature_networks import open_network
from megavis.evaluation.images.generation import FeatureCollector, ImageSetComparison, compare
from megavis.evaluation.images.statistics_files import read_statistics
from megavis.evaluation.likelihood import mean_loss
from megavis.evaluation.linear import HeldOutSplit, best_layer, score_layers
from megavis.evaluation.neighbors import accuracy_by_layer
from megavis.evaluation.probe import Pair, ProbeData, ProbeSettings
from megavis.notebook import Run
from megavis.sampling.pictures import Gallery

_NEIGHBORS = 20
_PICTURES = 8


class CheckpointMeasures:
    """The measures of one opened checkpoint; shared results are computed once."""

    def __init__(
        self, opened: Run, args: argparse.Namespace, distance: SampleFID | None = None
    ) -> None:
        """Store the run, the options of `add_data_arguments`, and the statistics for `frechet`."""
        self.opened, self.args, self.distance = opened, args, distance

    def numbers(self, name: str) -> Mapping[str, float | str]:
        """Return the results of a measure other than `samples`, by name.

        Raises:
            UserError: the run's images do not allow it.
        """
        measures: Mapping[str, Callable[[], Mapping[str, float | str]]] = {
            "loss": self._loss,
            "probe": self._probe,
            "neighbors": self._neighbors,
            DISTANCE: self._distance,
        }
        return measures[name]()

    def picture(self) -> np.ndarray:
        """Return a grid of generated images, uint8 `[H, W, 3]`.

        Raises:
            UserError: the paper's models cannot generate images.
        """
        gallery = Gallery(self.opened.objective, self.opened.folder)
        examples = read_in_turn(self._validation, _PICTURES).to(self.opened.context.device)
        return gallery.draw(self.opened.runner, examples, num_images=_PICTURES)

    def _loss(self) -> Mapping[str, float]:
        opened, limit = self.opened, self.args.validation_images
        loss = mean_loss(opened.runner, opened.objective, self._validation, limit=limit)
        return {"validation_loss": loss}

    def _probe(self) -> Mapping[str, float]:
        best = best_layer(score_layers(*self._features, self._division))
        return {"probe_accuracy": best.accuracy, "probe_layer": best.layer}

    def _neighbors(self) -> Mapping[str, float]:
        """Choose the layer on the same training images as the probe's layer."""
        train, validation = self._features
        parts = (self._division.fitted, self._division.held_out)
        selection = accuracy_by_layer(*(train.subset(part) for part in parts), k=_NEIGHBORS)
        layer = max(range(len(selection)), key=selection.__getitem__)
        accuracy = accuracy_by_layer(train, validation, k=_NEIGHBORS)[layer]
        return {"neighbors_accuracy": accuracy, "neighbors_layer": layer}

    def _distance(self) -> Mapping[str, float | str]:
        assert self.distance is not None
        found = self.distance.measure(self.opened)
        return {found.distance_key: found.distance, "distance_of": found.conditions}

    @functools.cached_property
    def _validation(self) -> ShardDataset:
        return open_held_out(self.opened, self.args.validation, option="--validation")

    @functools.cached_property
    def _data(self) -> ProbeData:
        return probe_data(self.opened, self.args)

    @functools.cached_property
    def _features(self) -> Pair:
        return self._data.features(network_of(self.opened, feature_cache(self.opened, self.args)))

    @functools.cached_property
    def _division(self) -> HeldOutSplit:
        train, _ = self._features
        return self._data.divide(train.labels, ProbeSettings(seed=self.args.seed))


_BATCH_SIZE = 64


class SampleFID:
    """Network and statistics, opened once for all checkpoints.

    Args:
        args: the options of `add_distance_arguments`, `device` and `seed`.

    Raises:
        UserError: an option is missing, or a file is invalid.
    """

    def __init__(self, args: argparse.Namespace) -> None:
        if args.reference is None or args.num_samples < 2:
            raise UserError(
                f"--what {DISTANCE} needs --reference FILE (`megavis evaluate statistics` writes"
                " one), and --num-samples of 2 or more"
            )
        self._num_images, self._seed = args.num_samples, args.seed
        self._device = device_of(args)
        self._network = open_network(args.inception, args.network, self._device)
        self._reference = read_statistics(args.reference)

    def measure(self, opened: Run) -> ImageSetComparison:
        """Generate images with the defaults of `megavis sample RUN` and compare them.

        Raises:
            UserError: the run has no unconditional samples, or the statistics are of another
                network.
        """
        sampler = opened.sampler(seed=self._seed)
        # Precision and recall would need tens of thousands.
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
