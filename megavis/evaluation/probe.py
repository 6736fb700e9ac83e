"""The linear probe of a run, beside raw pixels and an untrained network.

All three take the same images, the same division of the training images, and the same procedure:
what differs are the features.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Protocol

from megavis.config.errors import UserError
from megavis.data.dataset import ShardDataset
from megavis.data.files import write_atomically
from megavis.evaluation.features import LabelledFeatures, layer_features, pixel_features
from megavis.evaluation.linear import LayerScore, best_layer, divide, score_layers
from megavis.model.runner import Runner
from megavis.objectives.base import Objective
from megavis.tokenizers.palette import Palette


class Extract(Protocol):
    """Turns images into features."""

    def __call__(self, dataset: ShardDataset, *, limit: int | None) -> LabelledFeatures:
        """Return the features of the first `limit` images, of all when None."""


@dataclass(frozen=True)
class ProbeData:
    """The images of a probe.

    Attributes:
        train: fits the classifiers and chooses layer and penalty.
        validation: only reports.
        palette: colours of the tokens.
        num_train: only the first so many training images; all when None.
        num_validation: likewise.

    Raises:
        UserError: when the two sets number their classes in different ways.
    """

    train: ShardDataset
    validation: ShardDataset
    palette: Palette
    num_train: int | None = None
    num_validation: int | None = None

    def __post_init__(self) -> None:
        if self.train.class_names != self.validation.class_names:
            raise UserError(
                f"{self.validation.directory} numbers its classes in another way than"
                f" {self.train.directory}: write its shards with --classes-from"
            )

    def map(self, extract: Extract) -> tuple[LabelledFeatures, LabelledFeatures]:
        """Return the features of the training and of the validation images."""
        return (
            extract(self.train, limit=self.num_train),
            extract(self.validation, limit=self.num_validation),
        )


@dataclass(frozen=True)
class ProbeResult:
    """All numbers of a probe.

    Attributes:
        step: optimizer steps of the trained network.
        trained: a score for each layer of the run's network.
        untrained: the same of networks with the same config and fresh weights, one after another.
        pixels: the score of raw pixels.
        num_fitted: training images that candidates were fitted on.
        num_held_out: training images that layer and penalty were chosen on.
        num_validation: images that the accuracies are of.
        num_classes: classes among the training images.
        seed: of the division.
    """

    step: int
    trained: tuple[LayerScore, ...]
    untrained: tuple[tuple[LayerScore, ...], ...]
    pixels: LayerScore
    num_fitted: int
    num_held_out: int
    num_validation: int
    num_classes: int
    seed: int

    @property
    def best(self) -> LayerScore:
        """The trained network's layer that is best on the held-out training images."""
        return best_layer(self.trained)

    @property
    def untrained_accuracy(self) -> float:
        """The mean over the untrained networks of their best layers' accuracies.

        What an untrained network is good for depends on its random colours; hence several.
        """
        return statistics.mean(best_layer(scores).accuracy for scores in self.untrained)

    def write(self, path: Path) -> None:
        """Write everything as JSON, whole or not at all. Raises OSError."""
        content = {
            "best_layer": dataclasses.asdict(self.best),
            "untrained_accuracy": self.untrained_accuracy,
            **dataclasses.asdict(self),
        }
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, json.dumps(content, indent=2).encode() + b"\n")


def probe(
    trained: Runner,
    untrained: Iterable[Runner],
    objective: Objective,
    data: ProbeData,
    *,
    step: int,
    layers: Sequence[int] | None = None,
    seed: int = 0,
    held_out_share: float = 0.2,
) -> ProbeResult:
    """Probe the layers of a network, of untrained ones like it, and raw pixels.

    Args:
        trained: the network.
        untrained: at least one like it with fresh weights; taken one at a time.
        objective: the paper.
        data: the images.
        step: optimizer steps of the network, for the record.
        layers: which layers; all when absent.
        seed: of the division of the training images.
        held_out_share: part of the training images that layer and penalty are chosen on.

    Raises:
        UserError: when the images have no labels, or are too few.
    """
    pixels = data.map(partial(pixel_features, palette=data.palette))
    selection = divide(pixels[0].labels, share=held_out_share, seed=seed)
    scores = []
    for runner in itertools.chain([trained], untrained):
        features = data.map(partial(layer_features, runner, objective))
        scores.append(tuple(score_layers(*features, selection, layers=layers)))
    return ProbeResult(
        step=step,
        trained=scores[0],
        untrained=tuple(scores[1:]),
        pixels=score_layers(*pixels, selection)[0],
        num_fitted=len(selection.fitted),
        num_held_out=len(selection.held_out),
        num_validation=len(pixels[1].labels),
        num_classes=len(set(pixels[0].labels.tolist())),
        seed=seed,
    )
