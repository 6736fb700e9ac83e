"""Transfer evaluation against scikit-learn, layer selection, and result tables."""

from __future__ import annotations

import csv
from dataclasses import replace

import numpy as np
import pytest

from megavis.config.errors import UserError
from megavis.data.loading.dataset import sample_per_class
from megavis.evaluation.features import LabelledFeatures
from megavis.evaluation.linear import PENALTIES, PLAIN, HeldOutSplit, choose_penalty
from megavis.evaluation.probe import ProbeSettings, score_low_data
from megavis.evaluation.transfer import (
    Task,
    first_examples,
    markdown_of,
    transfer,
    write_transfer,
)

pytestmark = pytest.mark.once

NOISE = (4.0, 1.5, 2.5)


def features(count, *, seed):
    """Return three layers of four unbalanced clusters; the middle layer has the least noise."""
    random = np.random.default_rng(seed)
    labels = random.choice(4, count, p=[0.4, 0.3, 0.2, 0.1])
    clouds = 2 * np.eye(5)[labels]
    layers = [clouds + random.normal(0, noise, clouds.shape) for noise in NOISE]
    return LabelledFeatures(np.stack(layers).astype(np.float32), labels)


@pytest.fixture(scope="module")
def task():
    selection = HeldOutSplit(np.arange(96), np.arange(96, 120))
    splits = {"train": "toy, training set", "test": "toy, test set"}
    return Task("toy", "trained", features(120, seed=0), features(80, seed=1), selection, splits)


def fitted(x, y, penalty):
    from sklearn.linear_model import LogisticRegression
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    regression = LogisticRegression(C=1 / (penalty * len(x)), max_iter=300)
    return make_pipeline(StandardScaler(), regression).fit(x, y)


def expected(task):
    """Return layer, penalty, held-out, test and mean class accuracy from a plain grid search."""
    from sklearn.metrics import log_loss

    y = task.train.labels
    candidates = []
    for layer, x in enumerate(task.train.layers):
        for penalty in PENALTIES:
            model = fitted(x[:96], y[:96], penalty)
            held_out = model.predict_proba(x[96:])
            right = np.mean(model.classes_[held_out.argmax(1)] == y[96:])
            loss = log_loss(y[96:], held_out, labels=model.classes_)
            candidates.append((right, -loss, layer, penalty))
    right, _, layer, penalty = max(candidates, key=lambda each: each[:2])
    answers = fitted(task.train.layers[layer], y, penalty).predict(task.test.layers[layer])
    hits = answers == task.test.labels
    classes = [hits[task.test.labels == label].mean() for label in range(4)]
    return layer, penalty, right, hits.mean(), sum(classes) / 4


def test_transfer_matches_scikit_learn(task):
    [row] = transfer(task, ProbeSettings(), step=7)
    score = row.score
    layer, penalty, held_out, accuracy, class_accuracy = expected(task)
    assert (score.layer, score.penalty) == (layer, penalty)
    assert layer == 1
    assert score.selection_accuracy == pytest.approx(held_out)
    assert score.accuracy == pytest.approx(accuracy)
    assert score.class_accuracy == pytest.approx(class_accuracy)
    assert (row.num_train, row.num_held_out, row.num_test) == (120, 24, 80)


def test_given_layer_and_low_data_are_scored_too(task):
    settings = ProbeSettings(images_per_class=(5,), draws=3, seed=4)
    best, given, few = (row.score for row in transfer(task, settings, step=7, layer=0))
    assert (best.layer, best.layer_from) == (1, "held-out images")
    assert (given.layer, given.layer_from) == (0, "--layer")
    assert given.accuracy < best.accuracy
    [reference] = score_low_data("", task.train, task.test, settings, layer=1)
    assert (few.accuracy, few.deviation) == (reference.mean, reference.deviation)
    assert few.labels == "5 a class"


def test_plain_classifier_is_scikit_learns_default(task):
    """iGPT, section 3.4 and Table 4: no scaling, C = 1, also with few labels."""
    from sklearn.linear_model import LogisticRegression

    train, test = task.train, task.test
    settings = ProbeSettings(images_per_class=(5,), draws=3, seed=4, recipe=PLAIN)
    rows = transfer(task, settings, step=7, layer=0)
    best, given, few = (row.score for row in rows)
    assert {row.classifier for row in rows} == {"plain"}
    for score in (best, given):
        x = train.layers[score.layer]
        model = LogisticRegression(max_iter=300).fit(x, train.labels)
        assert score.accuracy == pytest.approx(model.score(test.layers[score.layer], test.labels))
        assert score.penalty == pytest.approx(1 / 120)
        held_out = LogisticRegression(max_iter=300).fit(x[:96], train.labels[:96])
        assert score.selection_accuracy == pytest.approx(held_out.score(x[96:], train.labels[96:]))
    accuracies = []
    for draw in range(3):
        images = sample_per_class(train.labels, 5, seed=4, draw=draw)
        model = LogisticRegression(max_iter=300).fit(
            train.layers[best.layer][images], train.labels[images]
        )
        accuracies.append(model.score(test.layers[best.layer], test.labels))
    assert few.accuracy == pytest.approx(np.mean(accuracies))
    assert few.deviation == pytest.approx(np.std(accuracies, ddof=1))


def test_first_examples_are_split_80_20():
    train = features(50, seed=0)
    few, selection = first_examples(train, 30, name="toy")
    assert (few.labels == train.labels[:30]).all()
    assert (selection.fitted == np.arange(24)).all()
    assert (selection.held_out == np.arange(24, 30)).all()
    with pytest.raises(UserError, match="--examples 51: toy has 50 labelled"):
        first_examples(train, 51, name="toy")
    one_class = replace(train, labels=np.zeros_like(train.labels))
    with pytest.raises(UserError, match="fewer than two classes"):
        first_examples(one_class, 30, name="toy")


@pytest.mark.parametrize("hidden", [0, 3])
def test_held_out_class_missing_from_fit_counts_as_wrong(hidden):
    """A small fit may lack a class; its held-out images get probability 0."""
    train = features(200, seed=3)
    y = train.labels
    selection = HeldOutSplit(np.flatnonzero(y[:150] != hidden), np.arange(150, 200))
    choice = choose_penalty(train.layers[1], y, [selection])
    x = train.layers[1]
    model = fitted(x[selection.fitted], y[selection.fitted], choice.penalty)
    assert choice.accuracy == pytest.approx(np.mean(model.predict(x[150:]) == y[150:]))
    assert choice.log_likelihood < np.mean(y[150:] == hidden) * np.log(1e-12)


def test_tables_list_all_scores_and_split_sizes(task, tmp_path):
    settings = ProbeSettings(images_per_class=(5,), draws=3)
    results = transfer(task, settings, step=7, layer=0)
    results += transfer(replace(task, name="other"), settings, step=7, layer=0)
    readable, table = write_transfer(tmp_path, results, title="# Title")
    rows = list(csv.DictReader(table.open()))
    assert [row["data_set"] for row in rows] == ["toy"] * 3 + ["other"] * 3
    best = results[0].score
    assert float(rows[0]["accuracy"]) == best.accuracy
    assert rows[0]["train"] == "toy, training set"
    assert {row["classifier"] for row in rows} == {"standardized"}
    assert (rows[0]["step"], rows[0]["num_test"], rows[2]["penalty"]) == ("7", "80", "")
    lines = readable.read_text().splitlines()
    assert lines[0] == "# Title"
    shown = (
        f"| toy | trained | {100 * best.accuracy:.1f} | {100 * best.class_accuracy:.1f} | all | 1 |"
    )
    assert lines[4].startswith(shown)
    assert lines[4].endswith("| 96 + 24 | 80 | 4 |")
    assert "| 0 (given) |" in lines[5]
    assert " ± " in lines[6]
    assert lines[10].startswith(
        f"| mean of the best layers | trained | {100 * best.accuracy:.1f} |"
    )
    assert lines[-1] == "- other: train: toy, training set; test: toy, test set"
    mixed = markdown_of(results, title="# Title", per_class=("other",)).splitlines()[10]
    mean = 50 * (best.accuracy + best.class_accuracy)
    assert best.accuracy != best.class_accuracy
    assert mixed.startswith(
        f"| mean of the best layers, by class for other | trained | {mean:.1f} |"
    )
