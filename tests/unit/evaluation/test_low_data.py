"""Low-data classification: the drawn images, and scores against scikit-learn."""

import statistics

import numpy as np
import pytest

from megavis.config.errors import UserError
from megavis.data.loading.dataset import sample_per_class
from megavis.evaluation.features import LabelledFeatures
from megavis.evaluation.linear import PENALTIES
from megavis.evaluation.probe import ProbeSettings, score_low_data

pytestmark = pytest.mark.once


def blobs(count, *, seed):
    """Return two layers of features: noise, then three overlapping clusters."""
    random = np.random.default_rng(seed)
    labels = np.arange(count) % 3
    points = random.normal(0, 2.0, (2, count, 5)).astype(np.float32)
    points[1] += 3 * np.eye(5, dtype=np.float32)[labels]
    return LabelledFeatures(points, labels)


def test_sample_per_class_draws_distinct_balanced_images():
    labels = np.repeat([0, 3, 5], [20, 10, 8])
    draws = [sample_per_class(labels, 4, seed=1, draw=number) for number in range(5)]
    for images in draws:
        assert len(set(images.tolist())) == 12
        assert np.bincount(labels[images]).tolist() == [4, 0, 0, 4, 0, 4]
    assert len({tuple(images.tolist()) for images in draws}) == 5
    assert sample_per_class(labels, 4, seed=1, draw=2).tolist() == draws[2].tolist()
    with pytest.raises(UserError, match="class 5 has 8 labelled training images"):
        sample_per_class(labels, 9, seed=1, draw=0)


def best_by_accuracy_then_loss(results):
    scores = [results[f"mean_test_{name}"].round(9) for name in ("accuracy", "neg_log_loss")]
    return max(range(len(PENALTIES)), key=lambda place: [score[place] for score in scores])


def test_scores_match_scikit_learn_cross_validation():
    from sklearn.linear_model import LogisticRegression
    from sklearn.model_selection import GridSearchCV, StratifiedKFold
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    train, validation = blobs(120, seed=0), blobs(90, seed=1)
    settings = ProbeSettings(images_per_class=(4, 20), draws=3, seed=7)
    small, large = score_low_data("trained", train, validation, settings, layer=1)

    expected = []
    for draw in range(3):
        chosen = sample_per_class(train.labels, 20, seed=7, draw=draw)
        x, y = train.layers[1][chosen], train.labels[chosen]
        # Each fit uses 4 of 5 folds, 48 images, and weights ½‖w‖² by penalty · 48.
        search = GridSearchCV(
            make_pipeline(StandardScaler(), LogisticRegression(max_iter=300)),
            {"logisticregression__C": [1 / (penalty * 48) for penalty in PENALTIES]},
            scoring=["accuracy", "neg_log_loss"],
            cv=StratifiedKFold(5, shuffle=True, random_state=0),
            refit=best_by_accuracy_then_loss,
        ).fit(x, y)
        penalty = 1 / (search.best_params_["logisticregression__C"] * 48)
        final = make_pipeline(
            StandardScaler(), LogisticRegression(C=1 / (penalty * 60), max_iter=300)
        ).fit(x, y)
        expected.append(final.score(validation.layers[1], validation.labels))

    assert large.accuracies == pytest.approx(expected)
    assert large.mean == pytest.approx(sum(expected) / 3)
    assert large.deviation == pytest.approx(statistics.stdev(expected))
    assert (small.images_per_class, small.layer, small.features) == (4, 1, "trained")
    assert small.mean < large.mean


def test_undrawn_images_do_not_affect_scores():
    train, validation = blobs(120, seed=0), blobs(90, seed=1)
    settings = ProbeSettings(images_per_class=(10,), draws=2)
    (before,) = score_low_data("trained", train, validation, settings, layer=1)

    drawn = np.concatenate([sample_per_class(train.labels, 10, seed=0, draw=i) for i in range(2)])
    others = np.setdiff1d(np.arange(120), drawn)
    layers = train.layers.copy()
    layers[:, others] = 1e3
    changed = LabelledFeatures(layers, train.labels)
    (after,) = score_low_data("trained", changed, validation, settings, layer=1)
    assert after == before
