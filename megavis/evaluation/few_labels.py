"""Linear classifiers on one layer's features with few labels.

iGPT, section 4.7 and Table 4: 4, 25 or 400 images per class, 5 random subsets, mean and standard
deviation. A penalty is selected by cross-validation within each subset, so labels outside it affect
only the choice of the layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean, stdev
from typing import TYPE_CHECKING

from megavis.config.errors import UserError
from megavis.data.loading.dataset import sample_per_class
from megavis.evaluation.features import LabelledFeatures
from megavis.evaluation.linear import (
    STANDARDIZED,
    FitRecipe,
    HeldOutSplit,
    choose_penalty,
    fit_classifier,
)
from megavis.evaluation.results import LowDataScore

if TYPE_CHECKING:
    import numpy as np

MAXIMUM_FOLDS = 5
"""Largest number of folds of the cross-validation; at most the number of images per class."""


def draw_subsets(labels: np.ndarray, count: int, *, draws: int, seed: int) -> list[np.ndarray]:
    """Draw the images of subsets of `count` per class, with labels int64 `[b]`.

    Raises:
        UserError: a class has fewer images.
    """
    try:
        return [sample_per_class(labels, count, seed=seed, draw=draw) for draw in range(draws)]
    except UserError as error:
        text = f"--images-per-class {count}: {error}; use more with --train-images"
        raise UserError(text) from None


def score_low_data(
    name: str,
    train: LabelledFeatures,
    validation: LabelledFeatures,
    *,
    layer: int,
    images_per_class: Sequence[int],
    draws: int,
    seed: int,
    recipe: FitRecipe = STANDARDIZED,
) -> list[LowDataScore]:
    """Score one layer's features with few labels per class, over several draws.

    Args:
        name: name of the features, for the record.
        images_per_class: sizes of subsets, each at least 2.
        draws: subsets of each size, at least 2.
        seed: seed of the subsets, which are the same for all features.
    """
    scores = []
    for count in images_per_class:
        subsets = draw_subsets(train.labels, count, draws=draws, seed=seed)
        accuracies = [
            _accuracy(train.subset(images), validation, layer, count, recipe) for images in subsets
        ]
        mean, deviation = fmean(accuracies), stdev(accuracies)
        scores.append(LowDataScore(name, layer, count, tuple(accuracies), mean, deviation))
    return scores


def _accuracy(
    few: LabelledFeatures, validation: LabelledFeatures, layer: int, count: int, recipe: FitRecipe
) -> float:
    from sklearn.model_selection import StratifiedKFold

    x, y = few.layers[layer], few.labels
    folds = StratifiedKFold(min(count, MAXIMUM_FOLDS), shuffle=True, random_state=0)
    best = choose_penalty(x, y, [HeldOutSplit(*parts) for parts in folds.split(x, y)], recipe)
    classifier = fit_classifier(x, y, penalty=best.penalty, standardize=recipe.standardize)
    return float(classifier.score(validation.layers[layer], validation.labels))
