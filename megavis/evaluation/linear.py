"""A linear classifier on fixed features; regularisation is chosen without the validation set.

iGPT, sections 2.4 and 3.4: logistic regression by L-BFGS. Layer and strength of the L2 penalty are
chosen on a held-out part of the training features; then the classifier is fitted again on all of
them (section 3.1) and meets the validation set once.

The paper names scikit-learn's L-BFGS and neither a standardisation nor a penalty: `PLAIN` takes
features as they are, and scikit-learn's one penalty.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import numpy as np
from threadpoolctl import threadpool_limits

from megavis.config.errors import UserError
from megavis.evaluation.features import LabelledFeatures

PENALTIES = (1e-5, 1e-4, 1e-3, 1e-2, 1e-1)
"""Candidates for the weight of ½‖w‖², relative to the mean cross-entropy."""

SINGLE_THREAD_BYTES = 2**28
"""Size of the features up to which a fit takes one BLAS thread.

Products with so few columns as there are classes are several times slower on two threads: 0.8
against 2.5 seconds for 5,000 × 160 features and 26 classes (AMD EPYC, 2 cores)."""


@dataclass(frozen=True)
class FitRecipe:
    """How a classifier is fitted.

    Attributes:
        standardize: subtract the mean of each feature and divide by its deviation, both of the
            features that are fitted.
        search: choose the penalty from `PENALTIES`; else that of scikit-learn, C = 1.
    """

    standardize: bool = True
    search: bool = True

    def penalties(self, count: int) -> Sequence[float]:
        """Return the candidates for a fit of `count` images."""
        # scikit-learn's C = 1 weighs the sum of cross-entropies, ours their mean.
        return PENALTIES if self.search else (1.0 / count,)


STANDARDIZED, PLAIN = FitRecipe(), FitRecipe(standardize=False, search=False)
RECIPES = {"standardized": STANDARDIZED, "plain": PLAIN}
"""By the names of `megavis probe --classifier`."""


@dataclass(frozen=True)
class HeldOutSplit:
    """How training features are divided to choose layer and penalty.

    Attributes:
        fitted: int64 indices that candidates are fitted on.
        held_out: int64 indices that they are compared on.
    """

    fitted: np.ndarray
    held_out: np.ndarray


@dataclass(frozen=True, order=True)
class HeldOutScore:
    """How well classifiers with a penalty do on features that they are not fitted on.

    The greater of two is the better: by accuracy, and between equals by cross-entropy, since where
    held-out images resemble the fitted ones many get every one right.

    Attributes:
        accuracy: share of right answers, in [0, 1].
        log_likelihood: mean log p(label), in nats.
        negative_penalty: -1 times the weight of the L2 penalty; the smaller penalty wins a tie.
    """

    accuracy: float
    log_likelihood: float
    negative_penalty: float

    @property
    def penalty(self) -> float:
        """The weight of the L2 penalty."""
        return -self.negative_penalty


@dataclass(frozen=True)
class LayerScore:
    """One layer's classifier.

    Attributes:
        layer: l, from 0.
        penalty: the chosen weight of the L2 penalty.
        selection_accuracy: share of right answers on the held-out training features, in [0, 1].
        selection_loss: cross-entropy on them, in nats.
        accuracy: share of right answers on the validation set, in [0, 1], after fitting on all
            training features.
        vote_accuracy: likewise, where each image's answer is the commonest over all views of it;
            None where there is one view.
    """

    layer: int
    penalty: float
    selection_accuracy: float
    selection_loss: float
    accuracy: float
    vote_accuracy: float | None = None


def divide(labels: np.ndarray, *, share: float, seed: int) -> HeldOutSplit:
    """Hold out `share` of the training features, each class in its proportion.

    Args:
        labels: int64 `[b]`.
        share: in (0, 1).
        seed: of the choice.

    Raises:
        UserError: when there are fewer than two classes, or too few images of one.
    """
    from sklearn.model_selection import train_test_split

    if len(np.unique(labels)) < 2:
        raise UserError(
            "the linear probe needs labelled images of at least two classes, and the training"
            f" shards give {len(np.unique(labels))}"
        )
    try:
        fitted, held_out = train_test_split(
            np.arange(len(labels)), test_size=share, random_state=seed, stratify=labels
        )
    except ValueError as error:
        raise UserError(f"too few training images for a linear probe: {error}") from None
    return HeldOutSplit(fitted, held_out)


def score_layers(
    train: LabelledFeatures,
    validation: LabelledFeatures,
    selection: HeldOutSplit,
    *,
    layers: Sequence[int] | None = None,
    recipe: FitRecipe = STANDARDIZED,
) -> list[LayerScore]:
    """Score each layer's features; raises nothing, a slow convergence only warns in sklearn.

    Args:
        train: features that classifiers are fitted on.
        validation: features that only report.
        selection: division of `train`.
        layers: which; all when absent.
        recipe: of the fits.
    """
    chosen = range(len(train.layers)) if layers is None else layers
    x = train.layers[0]
    workers = len(os.sched_getaffinity(0)) if x.nbytes <= SINGLE_THREAD_BYTES else 1
    # Around all of them: what a fit sets is the process's, and the first to end would restore it.
    with _settings_of_fits(x), ThreadPoolExecutor(workers) as pool:
        return [*pool.map(lambda i: _score(i, train, validation, selection, recipe), chosen)]


def best_layer(scores: Sequence[LayerScore]) -> LayerScore:
    """Return the score that is best on the held-out training features; the first of equals."""
    return max(scores, key=lambda score: (score.selection_accuracy, -score.selection_loss))


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
        vote = float((commonest(answers) == validation.labels).mean())
    return LayerScore(
        layer, best.penalty, best.accuracy, -best.log_likelihood, accuracy, vote_accuracy=vote
    )


def choose_penalty(
    x: np.ndarray,
    y: np.ndarray,
    selections: Sequence[HeldOutSplit],
    recipe: FitRecipe = STANDARDIZED,
) -> HeldOutScore:
    """Return the penalty that does best on held-out features, for a fit of all, and how well.

    Args:
        x: features `[b, width]`.
        y: int64 `[b]`.
        selections: divisions of the features, over which scores are averaged.
        recipe: of the fits.
    """

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


def commonest(answers: np.ndarray, *, seed: int = 0) -> np.ndarray:
    """Return the modal answer for each image, ties broken at random (iGPT, section 4.6).

    Args:
        answers: int64 `[views, b]`.
        seed: of the ties.

    Returns:
        int64 `[b]`.
    """
    classes, places = np.unique(answers, return_inverse=True)
    counts = np.zeros((answers.shape[1], len(classes)), np.float32)
    for view in places.reshape(answers.shape):
        counts[np.arange(len(counts)), view] += 1
    # Less than one vote: it decides between equal counts alone.
    counts += 0.5 * np.random.default_rng(seed).random(counts.shape, np.float32)
    return classes[counts.argmax(axis=1)]


def _score_held_out(classifier: Any, x: np.ndarray, y: np.ndarray) -> tuple[float, float]:
    """Return the share of right answers, and the mean of log p(y) in nats, p at least 1e-12.

    Args:
        classifier: what `fit_classifier` returns.
        x: features `[b, width]`.
        y: int64 `[b]`; a class that the classifier has not seen has probability 0.
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
    """Fit logistic regression by L-BFGS, on standardised features or on features as they are.

    It minimises mean cross-entropy + penalty · ½‖w‖², w of the features that it sees, biases free.

    Args:
        x: features `[b, width]`.
        y: int64 `[b]`.
        penalty: more than 0.
        standardize: see `FitRecipe`.

    Returns:
        A scikit-learn pipeline of `StandardScaler`, or nothing, and `LogisticRegression`.
    """
    from sklearn.linear_model import LogisticRegression
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    # scikit-learn minimises C · (sum of cross-entropies) + ½‖w‖².
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
        # A weakly penalised fit of separable features creeps on forever; it is good enough.
        warnings.simplefilter("ignore", ConvergenceWarning)
        yield
