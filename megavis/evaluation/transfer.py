"""Transfer: the linear probe of a run on data sets that it was not trained on.

Layer and penalty are chosen on held-out training images, the classifier is then fitted on all
training images, and meets the test images once ("A Large-scale Study of Representation Learning
with the Visual Task Adaptation Benchmark", section 2; iGPT, section 3.1).

Legend: b images.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from megavis.config.errors import UserError
from megavis.evaluation.features import LabelledFeatures
from megavis.evaluation.linear import HeldOutScore, HeldOutSplit, choose_penalty, fit_classifier
from megavis.evaluation.low_data import score_low_data

FITTED_SHARE = 0.8
"""Part of `--examples` that candidates are fitted on: 800 of VTAB's 1000."""
HELD_OUT, OPTION = "held-out images", "--layer"
TRAINED, PIXELS = "trained", "raw pixels"
"""Whose features; an untrained network's are named by their seed."""


@dataclass(frozen=True)
class Task:
    """A data set, as a network sees it, or as it is.

    Attributes:
        name: of the data set.
        features: whose they are, `trained`, `raw pixels`, or which untrained network's.
        train: features that classifiers are fitted on.
        test: features that only report.
        selection: division of `train`.
        splits: which images `train` and `test` are, for the record.
        num_equal: test images that were trained on all the same; None where that is not known.
    """

    name: str
    features: str
    train: LabelledFeatures
    test: LabelledFeatures
    selection: HeldOutSplit
    splits: Mapping[str, str]
    num_equal: int | None = None


@dataclass(frozen=True)
class TransferSettings:
    """What is done with each data set.

    Attributes:
        layers: candidates for the best layer; all when None.
        layer: score this layer too, whatever the held-out images say; None: no.
        images_per_class: score the best layer also with only so many labels, one after another.
        draws: random subsets of each such size.
        seed: of the subsets.

    Raises:
        UserError: when a number is too small.
    """

    layers: Sequence[int] | None = None
    layer: int | None = None
    images_per_class: Sequence[int] = ()
    draws: int = 5
    seed: int = 0

    def __post_init__(self) -> None:
        if min(self.images_per_class, default=2) < 2 or self.draws < 2:
            raise UserError("--images-per-class and --draws must be at least 2")


@dataclass(frozen=True)
class TransferScore:
    """One layer's classifier.

    Attributes:
        layer: l of the features.
        layer_from: what chose it, `held-out images` or `--layer`.
        labels: what it is fitted on: `all` training images, or `25 a class`.
        penalty: weight of ½‖w‖², relative to the mean cross-entropy; None where each draw of few
            labels chooses its own.
        selection_accuracy: share of right answers on the held-out images, in [0, 1]; None with
            few labels.
        accuracy: share of right answers on the test images; with few labels the mean over draws.
        class_accuracy: the same share in each class, averaged over classes; None with few labels.
        deviation: standard deviation of `accuracy` over draws of few labels, else None.
    """

    layer: int
    layer_from: str
    labels: str
    penalty: float | None
    selection_accuracy: float | None
    accuracy: float
    class_accuracy: float | None = None
    deviation: float | None = None


@dataclass(frozen=True)
class TransferResult:
    """What features are worth on one data set.

    Attributes:
        data_set: its name.
        features: whose, as `Task` has it.
        splits: which images were taken.
        num_train: training images, which the last classifier is fitted on.
        num_held_out: how many of these chose layer and penalty.
        num_test: images that the accuracies are of.
        num_equal: test images that were trained on all the same; None where that is not known.
        num_classes: classes among the training images.
        scores: the best layer first.
    """

    data_set: str
    features: str
    splits: Mapping[str, str]
    num_train: int
    num_held_out: int
    num_test: int
    num_equal: int | None
    num_classes: int
    scores: tuple[TransferScore, ...]


def num_fitted(examples: int) -> int:
    """Return how many of so many training images candidates are fitted on; the rest compares."""
    return round(FITTED_SHARE * examples)


def first_examples(
    train: LabelledFeatures, examples: int, *, name: str
) -> tuple[LabelledFeatures, HeldOutSplit]:
    """Return the first `examples` training images and their division.

    Shards are shuffled when they are written, so the first images are a random draw, and the same
    one for every run that is compared.

    Args:
        train: features of the training images; those to be held out come last.
        examples: how many.
        name: of the data set.

    Raises:
        UserError: there are fewer, or they show fewer than two classes.
    """
    if len(train.labels) < examples:
        raise UserError(
            f"--examples {examples}: {name} gives {len(train.labels)} labelled training images"
        )
    fitted, held_out = np.split(np.arange(examples), [num_fitted(examples)])
    if len(np.unique(train.labels[fitted])) < 2 or not len(held_out):
        raise UserError(f"--examples {examples}: these are of fewer than two classes; ask for more")
    return train.subset(np.arange(examples)), HeldOutSplit(fitted, held_out)


def transfer(task: Task, settings: TransferSettings) -> TransferResult:
    """Score the best layer on a data set, and what else the settings ask for.

    Pixels have one layer, whichever layers are asked for.

    Raises:
        UserError: a class has fewer images than `images_per_class`.
    """
    train = task.train
    if task.features == PIXELS:
        settings = replace(settings, layers=None, layer=None)
    layers = range(len(train.layers)) if settings.layers is None else settings.layers
    choices = {layer: _choose(task, layer) for layer in layers}
    # The first of equals.
    best = max(layers, key=lambda each: (choices[each].accuracy, choices[each].log_likelihood))
    scores = [_score(task, best, choices[best], HELD_OUT)]
    if settings.layer is not None:
        choice = choices.get(settings.layer) or _choose(task, settings.layer)
        scores.append(_score(task, settings.layer, choice, OPTION))
    return TransferResult(
        data_set=task.name,
        features=task.features,
        splits=task.splits,
        num_train=len(train.labels),
        num_held_out=len(task.selection.held_out),
        num_test=len(task.test.labels),
        num_equal=task.num_equal,
        num_classes=len(np.unique(train.labels)),
        scores=(*scores, *_few_labels(task, best, settings)),
    )


def _choose(task: Task, layer: int) -> HeldOutScore:
    return choose_penalty(task.train.layers[layer], task.train.labels, [task.selection])


def _score(task: Task, layer: int, choice: HeldOutScore, layer_from: str) -> TransferScore:
    from sklearn.metrics import accuracy_score, balanced_accuracy_score

    train, test = task.train, task.test
    classifier = fit_classifier(train.layers[layer], train.labels, penalty=choice.penalty)
    answers = classifier.predict(test.layers[layer])
    return TransferScore(
        layer=layer,
        layer_from=layer_from,
        labels="all",
        penalty=choice.penalty,
        selection_accuracy=choice.accuracy,
        accuracy=float(accuracy_score(test.labels, answers)),
        class_accuracy=float(balanced_accuracy_score(test.labels, answers)),
    )


def _few_labels(task: Task, layer: int, settings: TransferSettings) -> list[TransferScore]:
    scores = score_low_data(
        task.name,
        task.train,
        task.test,
        layer=layer,
        images_per_class=settings.images_per_class,
        draws=settings.draws,
        seed=settings.seed,
    )
    return [
        TransferScore(
            layer=score.layer,
            layer_from=HELD_OUT,
            labels=f"{score.images_per_class} a class",
            penalty=None,
            selection_accuracy=None,
            accuracy=score.mean,
            deviation=score.deviation,
        )
        for score in scores
    ]
