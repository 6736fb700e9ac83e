"""Linear classifiers on fixed features: of one layer, of concatenated layers.

iGPT, sections 2.4 and 3.4: logistic regression by L-BFGS. Layer and strength of the L2 penalty are
selected on a held-out part of the training features; then the classifier is fitted on all of them
(section 3.1) and evaluated once on the validation set. Section 4.4: "we concatenate features from 5
layers centered at the best single layer".

The paper uses scikit-learn's L-BFGS and mentions neither standardization nor a penalty: `PLAIN`
takes unchanged features and scikit-learn's default penalty. On ImageNet it uses SGD, which is
fine-tuning with frozen layers (`finetune.linear_evaluation`).
"""

from __future__ import annotations

import math
import os
import warnings
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from statistics import fmean
from typing import Any

import numpy as np
from threadpoolctl import threadpool_limits

from megavis.config.errors import UserError
from megavis.evaluation.features import LabelledFeatures
from megavis.evaluation.results import ConcatenatedScore, LayerScore
from megavis.parallel.progress_bar import shown

PENALTIES = (1e-5, 1e-4, 1e-3, 1e-2, 1e-1)
"""Candidate weights of ½‖w‖² relative to the mean cross-entropy."""

SINGLE_THREAD_BYTES = 2**28
"""Largest features, in bytes, for which a fit uses a single BLAS thread.

Matrix products with as few columns as classes are several times slower on two threads: 2.5 instead
of 0.8 seconds for 5,000 × 160 features and 26 classes (AMD EPYC, 2 cores)."""


@dataclass(frozen=True)
class FitRecipe:
    """Settings of a fit.

    Attributes:
        name: its value in `--classifier`, for the record.
        standardize: subtract the mean of each feature and divide by its standard deviation, both
            of the fitted features.
        search: select the penalty from `PENALTIES`; otherwise use scikit-learn's C = 1.
    """

    name: str
    standardize: bool
    search: bool

    def penalties(self, count: int) -> Sequence[float]:
        """Return the candidate penalties for a fit of `count` images."""
        # scikit-learn's C weights the sum of cross-entropies, not their mean.
        return PENALTIES if self.search else (1.0 / count,)


STANDARDIZED = FitRecipe("standardized", standardize=True, search=True)
PLAIN = FitRecipe("plain", standardize=False, search=False)
RECIPES = {recipe.name: recipe for recipe in (STANDARDIZED, PLAIN)}
"""Recipes by their names in `--classifier`."""


@dataclass(frozen=True)
class HeldOutSplit:
    """Split of the training features to select layer and penalty.

    Attributes:
        fitted: int64 indices for fitting the candidates.
        held_out: int64 indices for comparing them.
    """

    fitted: np.ndarray
    held_out: np.ndarray


@dataclass(frozen=True, order=True)
class HeldOutScore:
    """Score of a penalty on held-out features.

    Scores are compared by accuracy, then by log-likelihood, since many candidates may classify
    every held-out image correctly, then by the smaller penalty.

    Attributes:
        log_likelihood: mean log p(label), in nats.
        negative_penalty: -1 times the weight of the L2 penalty.
    """

    accuracy: float
    log_likelihood: float
    negative_penalty: float

    @property
    def penalty(self) -> float:
        """Weight of the L2 penalty."""
        return -self.negative_penalty


def divide(labels: np.ndarray, *, share: float, seed: int) -> HeldOutSplit:
    """Hold out a `share`, in (0, 1), of the training features, with labels int64 `[b]`.

    The split is stratified if each class has enough images. Otherwise, as for the first 5,000
    images of ImageNet, it is random, except that one image of each class stays to be fitted.

    Raises:
        UserError: there are fewer than two classes, or too few images.
    """
    from sklearn.model_selection import train_test_split

    classes, counts = np.unique(labels, return_counts=True)
    if len(classes) < 2:
        raise UserError(
            "the linear probe needs labelled images of at least two classes, and the training"
            f" shards have {len(classes)}"
        )
    num_held_out = math.ceil(share * len(labels))
    if counts.min() > 1 and len(classes) <= min(num_held_out, len(labels) - num_held_out):
        fitted, held_out = train_test_split(
            np.arange(len(labels)), test_size=share, random_state=seed, stratify=labels
        )
        return HeldOutSplit(fitted, held_out)
    order = np.random.default_rng(seed).permutation(len(labels))
    first = order[np.unique(labels[order], return_index=True)[1]]
    others = order[~np.isin(order, first)]
    held_out = others[:num_held_out]
    if len(np.unique(labels[held_out])) < 2:
        raise UserError(
            f"too few training images for a linear probe: {len(labels)} of {len(classes)} classes;"
            " it needs some of two classes to choose the layer on, besides those that it fits"
        )
    return HeldOutSplit(np.concatenate([first, others[num_held_out:]]), held_out)


def score_layers(
    train: LabelledFeatures,
    validation: LabelledFeatures,
    selection: HeldOutSplit,
    *,
    layers: Sequence[int] | None = None,
    recipe: FitRecipe = STANDARDIZED,
) -> list[LayerScore]:
    """Score the features of each layer, or of `layers`; fits need not converge."""
    chosen = range(len(train.layers)) if layers is None else layers
    x = train.layers[0]
    workers = len(os.sched_getaffinity(0)) if x.nbytes <= SINGLE_THREAD_BYTES else 1
    # Set outside the threads: these settings are global, and the first fit to finish would reset
    # them.
    with _settings_of_fits(x), ThreadPoolExecutor(workers) as pool:
        scores = pool.map(lambda i: _score(i, train, validation, selection, recipe), chosen)
        return [*shown(scores, "classifiers", total=len(chosen), unit="layer")]


def _score(
    layer: int,
    train: LabelledFeatures,
    validation: LabelledFeatures,
    selection: HeldOutSplit,
    recipe: FitRecipe,
) -> LayerScore:
    x, y = train.layers[layer], train.labels
    best = choose_penalty(x, y, [selection], recipe)
    classifier = fit_classifier(x, y, penalty=best.penalty, standardize=recipe.standardize)
    answers = np.stack([classifier.predict(view[layer]) for view in validation.views])
    accuracy = float((answers[0] == validation.labels).mean())
    vote = None
    if len(answers) > 1:
        vote = float((majority_vote(answers) == validation.labels).mean())
    return LayerScore(
        layer, best.penalty, best.accuracy, -best.log_likelihood, accuracy, vote_accuracy=vote
    )


def choose_penalty(
    x: np.ndarray,
    y: np.ndarray,
    selections: Sequence[HeldOutSplit],
    recipe: FitRecipe = STANDARDIZED,
) -> HeldOutScore:
    """Return the penalty with the best score on held-out features, averaged over the splits."""

    def score(place: int, penalty: float) -> HeldOutScore:
        scores = []
        for part in selections:
            classifier = fit_classifier(
                x[part.fitted],
                y[part.fitted],
                penalty=recipe.penalties(len(part.fitted))[place],
                standardize=recipe.standardize,
            )
            scores.append(_score_held_out(classifier, x[part.held_out], y[part.held_out]))
        accuracy, log_likelihood = map(fmean, zip(*scores, strict=True))
        return HeldOutScore(accuracy, log_likelihood, -penalty)

    return max(score(place, penalty) for place, penalty in enumerate(recipe.penalties(len(y))))


def majority_vote(answers: np.ndarray, *, seed: int = 0) -> np.ndarray:
    """Return the majority vote `[b]` of int64 `[views, b]`, ties at random (iGPT, section 4.6)."""
    classes, places = np.unique(answers, return_inverse=True)
    counts = np.zeros((answers.shape[1], len(classes)), np.float32)
    for view in places.reshape(answers.shape):
        counts[np.arange(len(counts)), view] += 1
    # Less than one vote, so it only breaks ties.
    counts += 0.5 * np.random.default_rng(seed).random(counts.shape, np.float32)
    return classes[counts.argmax(axis=1)]


def _score_held_out(classifier: Any, x: np.ndarray, y: np.ndarray) -> tuple[float, float]:
    """Return accuracy, and the mean of log p(y) in nats with p clipped to at least 1e-12.

    Classes that were not fitted have probability 0.
    """
    classes = classifier.classes_
    places = np.searchsorted(classes, y).clip(max=len(classes) - 1)
    seen = classes[places] == y
    probabilities = classifier.predict_proba(x)
    right = probabilities[np.arange(len(y)), places] * seen
    accuracy = ((probabilities.argmax(axis=1) == places) & seen).mean()
    return float(accuracy), float(np.log(right.clip(min=1e-12)).mean())


def fit_classifier(
    x: np.ndarray, y: np.ndarray, *, penalty: float, standardize: bool = True
) -> Any:
    """Fit logistic regression by L-BFGS to features `[b, width]`, with or without standardization.

    Minimizes mean cross-entropy + penalty · ½‖w‖², without a penalty on biases; w refers to the
    standardized features.

    Returns:
        A scikit-learn pipeline of an optional `StandardScaler` and `LogisticRegression`.
    """
    from sklearn.linear_model import LogisticRegression
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    # scikit-learn minimizes C · (sum of cross-entropies) + ½‖w‖².
    regression = LogisticRegression(C=1.0 / (penalty * len(x)), max_iter=300)
    scaler = StandardScaler() if standardize else "passthrough"
    classifier = make_pipeline(scaler, regression)
    with _settings_of_fits(x):
        return classifier.fit(x, y)


@contextmanager
def _settings_of_fits(x: np.ndarray) -> Iterator[None]:
    from sklearn.exceptions import ConvergenceWarning

    threads = 1 if x.nbytes <= SINGLE_THREAD_BYTES else None
    with threadpool_limits(threads, user_api="blas"), warnings.catch_warnings():
        # A weak penalty on separable features converges very slowly; the result is good enough.
        warnings.simplefilter("ignore", ConvergenceWarning)
        # Few images of many classes do not mean a regression task.
        warnings.filterwarnings("ignore", "The number of unique classes", UserWarning)
        yield


def adjacent_layers(centre: int, *, count: int, num_features: int) -> tuple[int, ...]:
    """Return `count` adjacent layers of 0 .. `num_features` - 1, centered if possible.

    At either end of the network the window is shifted inward.

    Raises:
        UserError: there are fewer layers.
    """
    if not 0 < count <= num_features:
        raise UserError(
            f"--concatenate {count}: the network has features of {num_features} layers;"
            f" choose a number from 1 to {num_features}"
        )
    first = min(max(centre - count // 2, 0), num_features - count)
    return tuple(range(first, first + count))


def score_concatenated(
    name: str,
    train: LabelledFeatures,
    validation: LabelledFeatures,
    selection: HeldOutSplit,
    *,
    centre: int,
    count: int,
    recipe: FitRecipe = STANDARDIZED,
) -> ConcatenatedScore:
    """Score `count` concatenated adjacent layers around `centre` by the procedure for one layer.

    `name` describes the features, for the record.

    Raises:
        UserError: there are fewer layers.
    """
    layers = adjacent_layers(centre, count=count, num_features=len(train.layers))
    together = train.concatenated(layers)
    others = validation.concatenated(layers)
    score = asdict(score_layers(together, others, selection, recipe=recipe)[0])
    score.pop("layer")
    return ConcatenatedScore(name, layers, together.layers.shape[-1], **score)
