"""Transfer: linear probe of a run on data sets that it was not trained on, and tables of results.

Layer and penalty are selected on held-out training images; then the classifier is fitted on all
training images and evaluated once on the test images ("A Large-scale Study of Representation
Learning with the Visual Task Adaptation Benchmark", section 2; iGPT, section 3.1).

Legend: b images.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean

import numpy as np

from megavis.config.errors import UserError
from megavis.data.format.files import write_atomically
from megavis.evaluation.features import LabelledFeatures
from megavis.evaluation.few_labels import score_low_data
from megavis.evaluation.figures import Row, markdown_table, write_table
from megavis.evaluation.linear import (
    FitRecipe,
    HeldOutScore,
    HeldOutSplit,
    choose_penalty,
    fit_classifier,
)
from megavis.evaluation.probe import ProbeSettings

FITTED_SHARE = 0.8
"""Fraction of `--examples` on which candidates are fitted: 800 of VTAB's 1000."""
HELD_OUT, OPTION = "held-out images", "--layer"
TRAINED, PIXELS = "trained", "raw pixels"
"""Names of features; untrained networks are named by their seed."""


@dataclass(frozen=True)
class Task:
    """A data set as features of a network, or as pixels.

    Attributes:
        features: `trained`, `raw pixels`, or the name of an untrained network.
        splits: descriptions of the images in `train` and `test`, for the record.
        num_equal: test images that were also trained on; None if unknown.
    """

    name: str
    features: str
    train: LabelledFeatures
    test: LabelledFeatures
    selection: HeldOutSplit
    splits: Mapping[str, str]
    num_equal: int | None = None


@dataclass(frozen=True)
class TransferScore:
    """The score of one layer's classifier.

    Attributes:
        layer_from: how it was selected, `held-out images` or `--layer`.
        labels: training data: `all` training images, or `25 a class`.
        penalty: weight of ½‖w‖² relative to the mean cross-entropy; None with few labels, where
            each draw selects its own.
        selection_accuracy: accuracy on the held-out images, in [0, 1]; None with few labels.
        accuracy: accuracy on the test images; with few labels, the mean over draws.
        class_accuracy: mean of the accuracies per class; None with few labels.
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
    """Scores of features on one data set.

    Attributes:
        num_held_out: training images on which layer and penalty were selected.
        num_equal: test images that were also trained on; None if unknown.
        classifier: name of the recipe by which classifiers were fitted.
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
    classifier: str
    scores: tuple[TransferScore, ...]


def num_fitted(examples: int) -> int:
    """Return the number of training images on which candidates are fitted."""
    return round(FITTED_SHARE * examples)


def first_examples(
    train: LabelledFeatures, examples: int, *, name: str
) -> tuple[LabelledFeatures, HeldOutSplit]:
    """Return the first `examples` training images and their split; held-out ones come last.

    Shards are shuffled when they are written, so the first images are a random draw, the same for
    all runs that are compared.

    Raises:
        UserError: there are fewer images, or fewer than two classes.
    """
    if len(train.labels) < examples:
        raise UserError(
            f"--examples {examples}: {name} has {len(train.labels)} labelled training images"
        )
    fitted, held_out = np.split(np.arange(examples), [num_fitted(examples)])
    if len(np.unique(train.labels[fitted])) < 2 or not len(held_out):
        raise UserError(f"--examples {examples}: these have fewer than two classes; use more")
    return train.subset(np.arange(examples)), HeldOutSplit(fitted, held_out)


def transfer(task: Task, settings: ProbeSettings, *, layer: int | None = None) -> TransferResult:
    """Score the best layer on a data set, with few labels too, and in addition `layer`.

    `settings` has the candidates, the recipe of the fits, and sizes, number and seed of the subsets
    with few labels. Pixels have a single layer, whatever is asked for.

    Raises:
        UserError: a class has fewer images than `images_per_class`.
    """
    train = task.train
    if task.features == PIXELS:
        settings, layer = replace(settings, layers=None), None
    layers = range(len(train.layers)) if settings.layers is None else settings.layers
    recipe = settings.recipe
    choices = {each: _choose(task, each, recipe) for each in layers}
    # The first of equal ones.
    best = max(layers, key=lambda each: (choices[each].accuracy, choices[each].log_likelihood))
    scores = [_score(task, best, choices[best], HELD_OUT, recipe)]
    if layer is not None:
        choice = choices.get(layer) or _choose(task, layer, recipe)
        scores.append(_score(task, layer, choice, OPTION, recipe))
    return TransferResult(
        data_set=task.name,
        features=task.features,
        splits=task.splits,
        num_train=len(train.labels),
        num_held_out=len(task.selection.held_out),
        num_test=len(task.test.labels),
        num_equal=task.num_equal,
        num_classes=len(np.unique(train.labels)),
        classifier=recipe.name,
        scores=(*scores, *_few_labels(task, best, settings)),
    )


def _choose(task: Task, layer: int, recipe: FitRecipe) -> HeldOutScore:
    return choose_penalty(task.train.layers[layer], task.train.labels, [task.selection], recipe)


def _score(
    task: Task, layer: int, choice: HeldOutScore, layer_from: str, recipe: FitRecipe
) -> TransferScore:
    from sklearn.metrics import accuracy_score, balanced_accuracy_score

    train, test = task.train, task.test
    classifier = fit_classifier(
        train.layers[layer],
        train.labels,
        penalty=choice.penalty,
        standardize=recipe.standardize,
    )
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


def _few_labels(task: Task, layer: int, settings: ProbeSettings) -> list[TransferScore]:
    scores = score_low_data(
        task.name,
        task.train,
        task.test,
        layer=layer,
        images_per_class=settings.images_per_class,
        draws=settings.draws,
        seed=settings.seed,
        recipe=settings.recipe,
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


_HEADER = (
    "data set",
    "features",
    "top-1, %",
    "mean of classes, %",
    "labels",
    "layer",
    "penalty",
    "held-out, %",
    "train + held out",
    "test",
    "classes",
)


def rows_of(results: Sequence[TransferResult], *, step: int, seed: int) -> list[Row]:
    """Return one row per classifier, with fractions in [0, 1]; cells may be empty."""
    return [
        {
            "data_set": result.data_set,
            "features": result.features,
            "step": step,
            "seed": seed,
            "classifier": result.classifier,
            **{key: "" if value is None else value for key, value in vars(score).items()},
            "num_train": result.num_train,
            "num_held_out": result.num_held_out,
            "num_test": result.num_test,
            "num_equal": "" if result.num_equal is None else result.num_equal,
            "num_classes": result.num_classes,
            "train": result.splits["train"],
            "selection": result.splits.get("selection", ""),
            "test": result.splits["test"],
        }
        for result in results
        for score in result.scores
    ]


def markdown_of(
    results: Sequence[TransferResult], *, title: str, per_class: Collection[str] = ()
) -> str:
    """Return the table as Markdown, with title, means over data sets, and notes on the images.

    The mean over data sets takes those in `per_class` with the mean accuracy of their classes
    ("How Well Do Self-Supervised Models Transfer?" (Ericsson et al.) does so for some).
    """
    rows = [_row(result, score) for result in results for score in result.scores]
    lines = markdown_table(_HEADER, [*rows, *_means(results, per_class)])
    return "\n".join([title, "", *lines, "", *_footnotes(results)]) + "\n"


def write_transfer(
    folder: Path,
    results: Sequence[TransferResult],
    *,
    title: str,
    step: int,
    seed: int,
    per_class: Collection[str] = (),
) -> list[Path]:
    """Write `transfer.md` and `transfer.csv` and return both paths. Raises OSError."""
    folder.mkdir(parents=True, exist_ok=True)
    readable = folder / "transfer.md"
    write_atomically(readable, markdown_of(results, title=title, per_class=per_class).encode())
    return [readable, write_table(folder / "transfer.csv", rows_of(results, step=step, seed=seed))]


def _means(results: Sequence[TransferResult], per_class: Collection[str]) -> Iterator[list[str]]:
    """Yield rows with means over data sets, for features evaluated on all of them."""
    data_sets = dict.fromkeys(result.data_set for result in results)
    for features in dict.fromkeys(result.features for result in results):
        own = [_measured(result, per_class) for result in results if result.features == features]
        if len(own) == len(data_sets) > 1:
            among = [name for name in data_sets if name in per_class]
            what = f", by class for {', '.join(among)}" if among else ""
            cells = [f"mean of the best layers{what}", features, f"{100 * fmean(own):.1f}"]
            yield [*cells, *[""] * (len(_HEADER) - len(cells))]


def _measured(result: TransferResult, per_class: Collection[str]) -> float:
    best = result.scores[0]
    if result.data_set not in per_class:
        return best.accuracy
    assert best.class_accuracy is not None
    return best.class_accuracy


def _row(result: TransferResult, score: TransferScore) -> list[str]:
    few = score.deviation is not None
    spread = f" ± {100 * score.deviation:.1f}" if score.deviation is not None else ""
    fitted = result.num_train - result.num_held_out
    return [
        result.data_set,
        result.features,
        f"{100 * score.accuracy:.1f}{spread}",
        _percent(score.class_accuracy),
        score.labels,
        f"{score.layer}" + (" (given)" if score.layer_from == OPTION else ""),
        "by draw" if score.penalty is None else f"{score.penalty:g}",
        _percent(score.selection_accuracy),
        "" if few else f"{fitted} + {result.num_held_out}",
        str(result.num_test),
        str(result.num_classes),
    ]


def _percent(share: float | None) -> str:
    return "" if share is None else f"{100 * share:.1f}"


def _footnotes(results: Sequence[TransferResult]) -> Iterator[str]:
    for name, splits in {result.data_set: result.splits for result in results}.items():
        images = "; ".join(f"{part}: {what}" for part, what in splits.items())
        yield f"- {name}: {images}"
