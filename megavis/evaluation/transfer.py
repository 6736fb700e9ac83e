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
from megavis.evaluation.figures import markdown_table, write_table
from megavis.evaluation.linear import (
    FitRecipe,
    HeldOutScore,
    HeldOutSplit,
    choose_penalty,
    fit_classifier,
)
from megavis.evaluation.probe import ProbeSettings, score_low_data
from megavis.evaluation.results import TransferRow, TransferScore

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


def num_fitted(examples: int) -> int:
    """Return the number of training images on which candidates are fitted."""
    return round(FITTED_SHARE * examples)


def first_examples(
    train: LabelledFeatures, examples: int, *, name: str
) -> tuple[LabelledFeatures, HeldOutSplit]:
    """Return the first `examples` training images and their split; held-out ones come last.

    The first images are a random draw (`representative`), the same for all runs that are compared.

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


def transfer(
    task: Task, settings: ProbeSettings, *, step: int, layer: int | None = None
) -> list[TransferRow]:
    """Score the best layer on a data set, with few labels too, and in addition `layer`.

    The best layer comes first. `step` is the checkpoint's, for the record.

    `settings` has the candidates, the recipe of the fits, and sizes, number and seed of the subsets
    with few labels. Pixels have a single layer, whichever is requested.

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
    return [
        TransferRow(
            data_set=task.name,
            features=task.features,
            step=step,
            seed=settings.seed,
            classifier=recipe.name,
            score=score,
            num_train=len(train.labels),
            num_held_out=len(task.selection.held_out),
            num_test=len(task.test.labels),
            num_equal=task.num_equal,
            num_classes=len(np.unique(train.labels)),
            train=task.splits["train"],
            selection=task.splits.get("selection"),
            test=task.splits["test"],
        )
        for score in (*scores, *_few_labels(task, best, settings))
    ]


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
        deviation=None,
    )


def _few_labels(task: Task, layer: int, settings: ProbeSettings) -> list[TransferScore]:
    return [
        TransferScore(
            layer=score.layer,
            layer_from=HELD_OUT,
            labels=f"{score.images_per_class} a class",
            penalty=None,
            selection_accuracy=None,
            accuracy=score.mean,
            class_accuracy=None,
            deviation=score.deviation,
        )
        for score in score_low_data(task.name, task.train, task.test, settings, layer=layer)
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


def markdown_of(rows: Sequence[TransferRow], *, title: str, per_class: Collection[str] = ()) -> str:
    """Return the table as Markdown, with title, means over data sets, and notes on the images.

    The mean over data sets takes those in `per_class` with the mean accuracy of their classes
    ("How Well Do Self-Supervised Models Transfer?" (Ericsson et al.) does so for some).
    """
    lines = markdown_table(_HEADER, [*map(_cells, rows), *_means(rows, per_class)])
    return "\n".join([title, "", *lines, "", *_footnotes(rows)]) + "\n"


def write_transfer(
    folder: Path, rows: Sequence[TransferRow], *, title: str, per_class: Collection[str] = ()
) -> list[Path]:
    """Write `transfer.md` and `transfer.csv` and return both paths. Raises OSError."""
    folder.mkdir(parents=True, exist_ok=True)
    readable = folder / "transfer.md"
    write_atomically(readable, markdown_of(rows, title=title, per_class=per_class).encode())
    return [readable, write_table(folder / "transfer.csv", [row.record() for row in rows])]


def _means(rows: Sequence[TransferRow], per_class: Collection[str]) -> Iterator[list[str]]:
    """Yield rows with means over data sets, for features evaluated on all of them."""
    data_sets = dict.fromkeys(row.data_set for row in rows)
    best = {(row.features, row.data_set): row for row in reversed(rows)}
    for features in dict.fromkeys(row.features for row in rows):
        own = [_measured(row, per_class) for key, row in best.items() if key[0] == features]
        if len(own) == len(data_sets) > 1:
            among = [name for name in data_sets if name in per_class]
            what = f", by class for {', '.join(among)}" if among else ""
            cells = [f"mean of the best layers{what}", features, f"{100 * fmean(own):.1f}"]
            yield [*cells, *[""] * (len(_HEADER) - len(cells))]


def _measured(best: TransferRow, per_class: Collection[str]) -> float:
    if best.data_set not in per_class:
        return best.score.accuracy
    assert best.score.class_accuracy is not None
    return best.score.class_accuracy


def _cells(row: TransferRow) -> list[str]:
    score = row.score
    few = score.deviation is not None
    spread = f" ± {100 * score.deviation:.1f}" if score.deviation is not None else ""
    fitted = row.num_train - row.num_held_out
    return [
        row.data_set,
        row.features,
        f"{100 * score.accuracy:.1f}{spread}",
        _percent(score.class_accuracy),
        score.labels,
        f"{score.layer}" + (" (given)" if score.layer_from == OPTION else ""),
        "by draw" if score.penalty is None else f"{score.penalty:g}",
        _percent(score.selection_accuracy),
        "" if few else f"{fitted} + {row.num_held_out}",
        str(row.num_test),
        str(row.num_classes),
    ]


def _percent(share: float | None) -> str:
    return "" if share is None else f"{100 * share:.1f}"


def _footnotes(rows: Sequence[TransferRow]) -> Iterator[str]:
    for name, row in {row.data_set: row for row in rows}.items():
        splits = {"train": row.train, "selection": row.selection, "test": row.test}
        yield f"- {name}: " + "; ".join(f"{part}: {what}" for part, what in splits.items() if what)
