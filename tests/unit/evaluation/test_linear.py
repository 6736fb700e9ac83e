"""Linear classifiers on features: optimality, selection of penalty and layer, and votes."""

import math
from dataclasses import replace

import numpy as np
import pytest
from threadpoolctl import threadpool_limits

from megavis.config.errors import UserError
from megavis.evaluation.features import LabelledFeatures
from megavis.evaluation.linear import (
    PENALTIES,
    PLAIN,
    divide,
    fit_classifier,
    majority_vote,
    score_layers,
)
from megavis.evaluation.results import LayerScore, best_layer

pytestmark = pytest.mark.once


def blobs(count, *, num_classes=3, width=6, spread=1.0, seed=0):
    """Return one layer of features: Gaussian clusters around scaled unit vectors."""
    random = np.random.default_rng(seed)
    labels = np.arange(count) % num_classes
    points = random.normal(0, spread, (count, width)) + 3 * np.eye(width)[labels]
    return LabelledFeatures(points[None].astype(np.float32), labels)


def objective(weights, biases, x, y, penalty):
    """Return mean cross-entropy + penalty · ½‖w‖², computed with plain loops."""
    total = 0.0
    for row, label in zip(x, y, strict=True):
        logits = [
            sum(w * v for w, v in zip(ws, row, strict=True)) + b
            for ws, b in zip(weights, biases, strict=True)
        ]
        total += math.log(sum(math.exp(z) for z in logits)) - logits[label]
    return total / len(x) + penalty / 2 * sum(w * w for ws in weights for w in ws)


def test_fit_minimizes_penalized_cross_entropy():
    data = blobs(30, width=3, spread=3.0)
    x, y, penalty = data.layers[0].astype(float), data.labels, 0.05
    scaler, regression = fit_classifier(x, y, penalty=penalty)
    x = (x - x.mean(0)) / x.std(0)
    np.testing.assert_allclose(scaler.mean_, data.layers[0].mean(0), atol=1e-6)

    best = objective(regression.coef_, regression.intercept_, x, y, penalty)
    for place in np.ndindex(3, 3):
        for step in (-0.01, 0.01):
            moved = regression.coef_.copy()
            moved[place] += step
            assert objective(moved, regression.intercept_, x, y, penalty) > best
    for place in range(3):
        moved = regression.intercept_ + 0.01 * np.eye(3)[place]
        assert objective(regression.coef_, moved, x, y, penalty) > best


def test_held_out_split_is_stratified_and_disjoint():
    labels = np.repeat([0, 1, 2], [50, 30, 20])
    selection = divide(labels, share=0.2, seed=1)

    assert sorted([*selection.fitted, *selection.held_out]) == list(range(100))
    assert np.bincount(labels[selection.held_out]).tolist() == [10, 6, 4]
    again, other = divide(labels, share=0.2, seed=1), divide(labels, share=0.2, seed=2)
    assert again.held_out.tolist() == selection.held_out.tolist()
    assert other.held_out.tolist() != selection.held_out.tolist()
    # As few held-out images as classes are still one of each.
    pairs = np.repeat([0, 1], 5)
    for seed in range(5):
        assert sorted(pairs[divide(pairs, share=0.2, seed=seed).held_out]) == [0, 1]


@pytest.mark.parametrize("num_images", [5000, 2000])
def test_split_of_a_thousand_classes_keeps_one_image_of_each_to_fit(num_images):
    """The first 5,000 of ImageNet's images have one of some classes and none of others."""
    labels = np.random.default_rng(0).integers(0, 1000, num_images)
    assert np.bincount(labels)[np.unique(labels)].min() == 1

    selection = divide(labels, share=0.2, seed=0)

    assert sorted([*selection.fitted, *selection.held_out]) == list(range(num_images))
    assert len(selection.held_out) == num_images // 5
    assert set(labels[selection.fitted]) == set(labels)
    again, other = divide(labels, share=0.2, seed=0), divide(labels, share=0.2, seed=1)
    assert again.held_out.tolist() == selection.held_out.tolist()
    assert other.held_out.tolist() != selection.held_out.tolist()


def test_split_with_one_image_of_a_class_fits_it():
    labels = np.array([0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 2])
    for seed in range(5):
        selection = divide(labels, share=0.4, seed=seed)
        assert 10 in selection.fitted
        assert set(labels[selection.held_out]) <= {0, 1}


@pytest.mark.parametrize("labels", [[0, 0, 0, 0], [0, 0, 0, 1], [], [0, 1, 2, 3]])
def test_too_few_images_or_classes_raise(labels):
    with pytest.raises(UserError, match=r"at least two classes|too few"):
        divide(np.array(labels, dtype=np.int64), share=0.2, seed=0)


def test_informative_layer_scores_best():
    train, validation = blobs(120), blobs(60, seed=1)
    noise = np.random.default_rng(2).normal(size=(2, 180, 6)).astype(np.float32)
    train = replace(train, layers=np.stack([noise[0, :120], train.layers[0], noise[1, :120]]))
    validation = replace(
        validation, layers=np.stack([noise[0, 120:], validation.layers[0], noise[1, 120:]])
    )

    scores = score_layers(train, validation, divide(train.labels, share=0.25, seed=0))

    assert [score.layer for score in scores] == [0, 1, 2]
    assert best_layer(scores).layer == 1
    assert scores[1].accuracy > 0.9 > 0.6 > scores[0].accuracy
    assert {score.penalty for score in scores} <= set(PENALTIES)
    only = score_layers(train, validation, divide(train.labels, share=0.25, seed=0), layers=[2])
    assert only == [scores[2]]


def test_validation_set_does_not_affect_selection():
    train, validation = blobs(90, spread=3.0), blobs(60, spread=3.0, seed=1)
    selection = divide(train.labels, share=0.2, seed=0)
    wrong = replace(validation, labels=(validation.labels + 1) % 3)

    honest = score_layers(train, validation, selection)[0]
    fooled = score_layers(train, wrong, selection)[0]

    assert replace(fooled, accuracy=honest.accuracy) == honest
    assert fooled.accuracy < honest.accuracy


@pytest.mark.once
def test_score_layers_matches_scikit_learn_grid_search():
    """Standardized features, grid search of the penalty on one split, refit on all images."""
    from sklearn.linear_model import LogisticRegression
    from sklearn.model_selection import GridSearchCV, PredefinedSplit
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    # Few images with many features, so that the penalty matters.
    train, validation = (blobs(100, spread=2.0, width=20, seed=seed) for seed in (0, 1))
    x, y = train.layers[0].astype(float), train.labels
    selection = divide(y, share=0.2, seed=0)
    held_out = np.full(len(y), -1)
    held_out[selection.held_out] = 0
    pipeline = make_pipeline(StandardScaler(), LogisticRegression(solver="newton-cg", tol=1e-8))
    # C weights the summed cross-entropy against ½‖w‖²; the search fits on 80 images.
    search = GridSearchCV(
        pipeline,
        {"logisticregression__C": [1 / (80 * penalty) for penalty in PENALTIES]},
        scoring={"accuracy": "accuracy", "likelihood": "neg_log_loss"},
        cv=PredefinedSplit(held_out),
        refit=False,
    ).fit(x, y)
    found = search.cv_results_
    scores = [*zip(found["mean_test_accuracy"], found["mean_test_likelihood"], strict=True)]
    best = max(range(len(PENALTIES)), key=scores.__getitem__)
    pipeline.set_params(logisticregression__C=1 / (100 * PENALTIES[best])).fit(x, y)

    ours = score_layers(train, validation, selection)[0]

    assert ours.penalty == PENALTIES[best]
    assert ours.selection_accuracy == pytest.approx(scores[best][0])
    assert ours.selection_loss == pytest.approx(-scores[best][1], rel=1e-3)
    assert ours.accuracy == pytest.approx(pipeline.score(validation.layers[0], validation.labels))


def test_plain_recipe_matches_scikit_learn_defaults():
    """iGPT, section 3.4, cites scikit-learn's L-BFGS and states neither scaling nor penalty."""
    from sklearn.linear_model import LogisticRegression

    train, validation = (blobs(100, spread=2.0, width=20, seed=seed) for seed in (0, 1))
    train, validation = (replace(data, layers=data.layers / 5) for data in (train, validation))
    x, y = train.layers[0].astype(float), train.labels
    selection = divide(y, share=0.2, seed=0)
    half = LogisticRegression(max_iter=10_000, tol=1e-8)
    half.fit(x[selection.fitted], y[selection.fitted])
    whole = LogisticRegression(max_iter=10_000, tol=1e-8).fit(x, y)

    ours = score_layers(train, validation, selection, recipe=PLAIN)[0]

    held_out = half.predict_log_proba(x[selection.held_out])
    right = held_out[np.arange(len(held_out)), y[selection.held_out]]
    assert ours.selection_loss == pytest.approx(-right.mean(), rel=1e-3)
    assert ours.accuracy == whole.score(validation.layers[0], validation.labels)
    assert ours.penalty == 1 / 100


def test_fit_is_independent_of_the_number_of_threads():
    data = blobs(2000, num_classes=20, width=160, spread=3.0)
    x, y = data.layers[0], data.labels
    coefficients = []
    for threads in (1, 2):
        with threadpool_limits(threads, user_api="blas"):
            _, regression = fit_classifier(x, y, penalty=1e-4)
        coefficients.append(regression.coef_)
    np.testing.assert_array_equal(*coefficients)


def test_best_layer_breaks_ties_by_first():
    scores = [LayerScore(layer, 0.1, 0.9, 0.8, layer / 10, None) for layer in range(3)]
    scores.append(LayerScore(3, 0.1, 0.9, 0.9, 1.0, None))
    scores.append(LayerScore(4, 0.1, 0.8, 0.1, 1.0, None))
    assert best_layer(scores).layer == 0


def test_majority_vote_breaks_ties_at_random():
    answers = np.array([[3, 7, 7, 9], [3, 7, 9, 7], [5, 7, 3, 3]])
    winners = np.array([majority_vote(answers, seed=seed) for seed in range(300)])
    assert (winners[:, :2] == [3, 7]).all()
    for column in (2, 3):
        values, counts = np.unique(winners[:, column], return_counts=True)
        assert values.tolist() == [3, 7, 9]
        # 300 draws with probability 1/3: 100 ± 8.2; allow five standard deviations.
        assert (abs(counts - 100) < 41).all()
    # Images with the same tie are broken independently.
    assert len(set(majority_vote(np.tile([[0], [1]], 50)).tolist())) == 2


def test_vote_accuracy_uses_the_modal_prediction_over_views():
    train, validation = blobs(120, spread=2.0), blobs(60, spread=2.0, seed=1)
    random = np.random.default_rng(3)
    views = tuple(
        validation.layers + random.normal(0, 2.0, validation.layers.shape) for _ in range(4)
    )
    selection = divide(train.labels, share=0.25, seed=0)

    alone = score_layers(train, validation, selection)[0]
    score = score_layers(train, replace(validation, further_views=views), selection)[0]

    assert alone.vote_accuracy is None
    assert replace(score, vote_accuracy=None) == alone
    classifier = fit_classifier(train.layers[0], train.labels, penalty=score.penalty)
    right = undecided = 0
    for image, label in enumerate(validation.labels):
        answers = [
            int(classifier.predict(view[0, image][None])[0]) for view in (validation.layers, *views)
        ]
        counts = sorted(((answers.count(a), a) for a in set(answers)), reverse=True)
        if len(counts) > 1 and counts[0][0] == counts[1][0]:
            undecided += 1
        else:
            right += counts[0][1] == label
    assert undecided < 20
    assert right <= round(score.vote_accuracy * 60) <= right + undecided
