"""What `megavis evaluate watch` measures of a checkpoint, each measure by its name."""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from megavis.commands import sample_fid as drawn_distance

if TYPE_CHECKING:
    import numpy as np

    from megavis.commands.sample_fid import SampleFID
    from megavis.data.loading.dataset import ShardDataset
    from megavis.evaluation.linear import HeldOutSplit
    from megavis.evaluation.probe import Pair, ProbeData
    from megavis.notebook import Run

MEASURES = ("loss", "probe", "neighbors", "samples", drawn_distance.MEASURE)
_NEIGHBORS = 20
_PICTURES = 8


class CheckpointMeasures:
    """The measures of one opened checkpoint; what they share is computed once."""

    def __init__(
        self, opened: Run, args: argparse.Namespace, distance: SampleFID | None = None
    ) -> None:
        """Remember the run, the options of `add_data_arguments`, and what `frechet` measures by."""
        self.opened, self.args, self.distance = opened, args, distance

    def numbers(self, name: str) -> Mapping[str, float | str]:
        """Return the numbers of a measure other than `samples`, by the name of each.

        Raises:
            UserError: the run's images do not allow it.
        """
        measures: Mapping[str, Callable[[], Mapping[str, float | str]]] = {
            "loss": self._loss,
            "probe": self._probe,
            "neighbors": self._neighbors,
            drawn_distance.MEASURE: self._distance,
        }
        return measures[name]()

    def picture(self) -> np.ndarray:
        """Return what the run draws now, uint8 `[H, W, 3]`.

        Raises:
            UserError: the paper's models cannot be drawn so.
        """
        from megavis.commands.opening import read_in_turn
        from megavis.sampling.pictures import Gallery

        gallery = Gallery(self.opened.objective, self.opened.folder)
        examples = read_in_turn(self._validation, _PICTURES).to(self.opened.context.device)
        return gallery.draw(self.opened.runner, examples, num_images=_PICTURES)

    def _loss(self) -> Mapping[str, float]:
        from megavis.evaluation.likelihood import mean_loss

        opened, limit = self.opened, self.args.validation_images
        loss = mean_loss(opened.runner, opened.objective, self._validation, limit=limit)
        return {"validation_loss": loss}

    def _probe(self) -> Mapping[str, float]:
        from megavis.evaluation.linear import best_layer, score_layers

        best = best_layer(score_layers(*self._features, self._division))
        return {"probe_accuracy": best.accuracy, "probe_layer": best.layer}

    def _neighbors(self) -> Mapping[str, float]:
        """The layer is chosen on the training images that choose the probe's layer too."""
        from megavis.evaluation.neighbors import accuracy_by_layer

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
        from megavis.commands.opening import open_held_out

        return open_held_out(self.opened, self.args.validation, option="--validation")

    @functools.cached_property
    def _data(self) -> ProbeData:
        from megavis.commands.probing import probe_data

        return probe_data(self.opened, self.args)

    @functools.cached_property
    def _features(self) -> Pair:
        from megavis.commands.networks import feature_cache, network_of

        return self._data.features(network_of(self.opened, feature_cache(self.opened, self.args)))

    @functools.cached_property
    def _division(self) -> HeldOutSplit:
        from megavis.evaluation.probe import ProbeSettings

        train, _ = self._features
        return self._data.divide(train.labels, ProbeSettings(seed=self.args.seed))
