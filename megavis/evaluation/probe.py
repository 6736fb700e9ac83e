"""The linear probe of a run, beside raw pixels and untrained networks.

All three take the same images, the same division of the training images, and the same procedure:
what differs are the features.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from megavis.config.errors import UserError
from megavis.data.dataset import ShardDataset
from megavis.evaluation.concatenation import ConcatenatedScore, score_concatenated
from megavis.evaluation.features import (
    LabelledFeatures,
    has_random_inputs,
    layer_features,
    pixel_features,
)
from megavis.evaluation.linear import LayerScore, best_layer, divide, score_layers
from megavis.evaluation.low_data import LowDataScore, score_low_data
from megavis.evaluation.probe_result import ProbeResult
from megavis.model.runner import Runner
from megavis.objectives.trainable import Trainable
from megavis.tokenizers.palette import Palette

Pair = tuple[LabelledFeatures, LabelledFeatures]
"""Features of the training and of the validation images."""

NUM_VIEWS = 5
"""Independent masks of an image, of which the commonest answer counts (iGPT, section 4.6)."""


@dataclass(frozen=True)
class ProbeData:
    """The images of a probe.

    Attributes:
        train: fits the classifiers and chooses layer and penalty.
        validation: only reports.
        palette: colours of the tokens of palette shards.
        num_train: only the first so many training images; all when None.
        num_validation: likewise.

    Raises:
        UserError: when the two sets number their classes in different ways.
    """

    train: ShardDataset
    validation: ShardDataset
    palette: Palette | None = None
    num_train: int | None = None
    num_validation: int | None = None

    def __post_init__(self) -> None:
        if self.train.class_names != self.validation.class_names:
            raise UserError(
                f"{self.validation.directory} numbers its classes in another way than"
                f" {self.train.directory}: write its shards with --classes-from"
            )

    def pixels(self) -> Pair:
        """Return the colours of both sets."""
        return (
            pixel_features(self.train, palette=self.palette, limit=self.num_train),
            pixel_features(self.validation, palette=self.palette, limit=self.num_validation),
        )

    def features(self, runner: Runner, objective: Trainable, *, num_views: int = 1) -> Pair:
        """Return a network's features of both sets; the validation images in so many views."""
        train, validation = self.train, self.validation
        return (
            layer_features(runner, objective, train, limit=self.num_train),
            layer_features(
                runner, objective, validation, limit=self.num_validation, num_views=num_views
            ),
        )


@dataclass(frozen=True)
class ProbeSettings:
    """What a probe does.

    Attributes:
        layers: which layers; all when None.
        seed: of the division of the training images, and of subsets.
        held_out_share: part of the training images that layer and penalty are chosen on.
        num_views: random draws for the inputs of each validation image, of which the commonest
            answer counts; when None, 5 where inputs are random as BERT's are, else 1.
        concatenate: score also so many adjacent layers together, around the best one; 0: none.
        images_per_class: score also with only so many labels, one after another.
        draws: random subsets of each such size.

    Raises:
        UserError: when a number is too small.
    """

    layers: Sequence[int] | None = None
    seed: int = 0
    held_out_share: float = 0.2
    num_views: int | None = None
    concatenate: int = 0
    images_per_class: Sequence[int] = ()
    draws: int = 5

    def __post_init__(self) -> None:
        if min(self.images_per_class, default=2) < 2 or self.draws < 2:
            raise UserError("--images-per-class and --draws must be at least 2")
        if self.concatenate < 0 or (self.num_views or 1) < 1:
            raise UserError("--concatenate must be at least 0 and --masks at least 1")


def probe(
    trained: Runner,
    untrained: Iterable[Runner],
    objective: Trainable,
    data: ProbeData,
    *,
    step: int,
    settings: ProbeSettings | None = None,
) -> ProbeResult:
    """Probe the layers of a network, of untrained ones like it, and raw pixels.

    Args:
        trained: the network.
        untrained: at least one like it with fresh weights; taken one at a time.
        objective: the paper.
        data: the images.
        step: optimizer steps of the network, for the record.
        settings: what to do; the defaults when absent.

    Raises:
        UserError: when the images have no labels, or are too few.
    """
    settings = settings or ProbeSettings()
    num_views = settings.num_views or (
        NUM_VIEWS if has_random_inputs(objective.feature_inputs, data.validation) else 1
    )
    pixels = data.pixels()
    selection = divide(pixels[0].labels, share=settings.held_out_share, seed=settings.seed)
    pixel_score = score_layers(*pixels, selection)[0]
    low_data = _low_data("pixels", pixels, pixel_score, settings)
    scores: list[tuple[LayerScore, ...]] = []
    concatenated: list[ConcatenatedScore] = []
    for number, runner in enumerate(itertools.chain([trained], untrained)):
        name = "untrained" if number else "trained"
        features = data.features(runner, objective, num_views=num_views)
        scores.append(tuple(score_layers(*features, selection, layers=settings.layers)))
        best, count = best_layer(scores[-1]), settings.concatenate
        if count:
            together = score_concatenated(
                name, *features, selection, centre=best.layer, count=count
            )
            concatenated.append(together)
        if number < 2:
            low_data += _low_data(name, features, best, settings)
    return ProbeResult(
        step=step,
        trained=scores[0],
        untrained=tuple(scores[1:]),
        pixels=pixel_score,
        num_fitted=len(selection.fitted),
        num_held_out=len(selection.held_out),
        num_validation=len(pixels[1].labels),
        num_classes=len(set(pixels[0].labels.tolist())),
        num_views=num_views,
        seed=settings.seed,
        concatenated=tuple(concatenated),
        low_data=tuple(low_data),
    )


def score_pixels(data: ProbeData, settings: ProbeSettings) -> LayerScore:
    """Return the score of raw pixels alone; raises as `probe`."""
    pixels = data.pixels()
    selection = divide(pixels[0].labels, share=settings.held_out_share, seed=settings.seed)
    return score_layers(*pixels, selection)[0]


def _low_data(
    name: str, features: Pair, best: LayerScore, settings: ProbeSettings
) -> list[LowDataScore]:
    return score_low_data(
        name,
        *features,
        layer=best.layer,
        images_per_class=settings.images_per_class,
        draws=settings.draws,
        seed=settings.seed,
    )
