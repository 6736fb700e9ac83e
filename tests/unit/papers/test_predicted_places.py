"""Figures and metrics of predicted positions against plain loops."""

import argparse
import itertools
import math
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from megavis.config.errors import UserError
from megavis.evaluation.classes import neighbor_accuracy
from megavis.evaluation.figures import FigureInput
from megavis.evaluation.token_relations import (
    AttentionMaps,
    Correlations,
    attention_rows,
    correlation,
    correlation_rows,
    relative_map,
)
from megavis.papers.mp3 import place_figures


def test_reassemble_averages_patches_at_one_position():
    torch.manual_seed(0)
    patches, places = torch.randn(2, 9, 5), torch.randint(9, (2, 9))
    image, filled = place_figures.reassemble(patches, places)
    for b in range(2):
        for place in range(9):
            here = [patches[b, p] for p in range(9) if places[b, p] == place]
            assert bool(filled[b, place]) == bool(here)
            expected = sum(here) / len(here) if here else torch.zeros(5)
            torch.testing.assert_close(image[b, place], expected)
    assert not filled.all()


def test_outline():
    images = np.zeros((1, 8, 8, 3), np.uint8)
    chosen = torch.tensor([[False, True, False, False]])
    drawn = place_figures.outline(images, chosen)[0, :, :, 1]
    expected = np.zeros((8, 8), np.uint8)
    expected[0:4, 4:8] = 200
    expected[1:3, 5:7] = 0
    assert np.array_equal(drawn, expected)


class PositionsStub:
    """Predicts the position in a patch's first value; half of the patches are context."""

    num_places = 4
    num_placed = 0
    reads = SimpleNamespace(grid=(2, 2))
    mask_ratio = 0.5

    def patches_of(self, images):
        cells = torch.tensor([[0.0], [1.0], [2.0], [2.0]])
        return cells.expand(len(images), 4, 1)

    def images_of(self, patches):
        return patches.reshape(-1, 2, 2, 1).expand(-1, 2, 2, 3).to(torch.uint8)

    def context_of(self, sample_index, mask_ratio):
        return torch.tensor([[0, 1]]).expand(len(sample_index), 2)

    def inputs_with(self, patches, context):
        return patches, context

    def outputs(self, predictions):
        return predictions


class RunnerStub:
    context = type("Context", (), {"device": torch.device("cpu")})

    def predictions(self, inputs):
        return torch.nn.functional.one_hot(inputs[0][..., 0].long(), 4).float()


def test_position_accuracy(monkeypatch):
    from megavis.data.loading.loader import Batch

    batch = Batch(torch.zeros(3, 2, 2, 3), torch.zeros(3), torch.arange(3))
    monkeypatch.setattr(place_figures, "evaluation_batches", lambda *_, **__: [batch])
    half = {"mask_ratio": 0.5, "num_images": 3}
    score = place_figures.position_accuracy(RunnerStub(), PositionsStub(), [0] * 3, **half)
    assert (score.accuracy, score.of_context, score.of_masked) == (0.75, 1.0, 0.5)
    assert score.chance == 0.25
    # A patch whose position is given is not scored.
    places = PositionsStub()
    places.num_placed = 1
    score = place_figures.position_accuracy(RunnerStub(), places, [0] * 3, **half)
    assert (score.accuracy, score.of_context, score.of_masked) == (2 / 3, 1.0, 0.5)


def test_jigsaw_and_mixture_rows():
    image = torch.zeros(2, 2, 3, dtype=torch.uint8)
    inference, places = RunnerStub(), PositionsStub()
    rows, accuracies = place_figures.jigsaw_rows(inference, places, image, (0.0, 0.5))
    assert accuracies == [0.75, 0.75]
    assert [len(row) for row in rows] == [2, 2, 2]
    # No patch is placed at the last position.
    assert rows[2][0][:, :, 0].flatten().tolist() == [0, 1, 2, 127]
    mixed = place_figures.mixture_rows(inference, places, image.expand(2, 2, 2, 3), (0.0, 0.25))
    assert [len(row) for row in mixed] == [6, 6]
    places.num_placed = 1
    _, accuracies = place_figures.jigsaw_rows(inference, places, image, (0.0,))
    assert accuracies == [pytest.approx(2 / 3)]


@pytest.mark.parametrize("count", [1, 3])
def test_images_without_a_partner_are_not_mixed(monkeypatch, count):
    """Small folders may have fewer images than were asked for."""

    def read(folder, wanted):
        assert wanted == 4
        return SimpleNamespace(inputs=torch.zeros(count, 2, 2, 3, dtype=torch.uint8))

    monkeypatch.setattr(place_figures, "read_round_robin", read)
    monkeypatch.setattr(place_figures.Places, "of", lambda _: PositionsStub())
    folder = SimpleNamespace(directory="shards")
    subject = FigureInput(Path("run"), SimpleNamespace(), RunnerStub(), folder)
    options = argparse.Namespace(num_images=2, seed=0)
    if count == 1:
        with pytest.raises(UserError, match="shards has one image"):
            place_figures.plot_mixture(subject, options)
        return
    drawn = place_figures.plot_mixture(subject, options)
    assert drawn.lines[0].startswith("1 pairs")


def test_jigsaws_of_the_first_eight_images_are_drawn(monkeypatch):
    images = SimpleNamespace(inputs=torch.zeros(11, 2, 2, 3, dtype=torch.uint8))
    monkeypatch.setattr(place_figures, "read_round_robin", lambda *_: images)
    monkeypatch.setattr(place_figures.Places, "of", lambda _: PositionsStub())
    drawn, ratios = [], len(place_figures._RATIOS)
    monkeypatch.setattr(place_figures, "image_grid", drawn.append)
    subject = FigureInput(Path("run"), SimpleNamespace(), RunnerStub(), SimpleNamespace())
    figure = place_figures.plot_jigsaw(subject, argparse.Namespace(num_images=11, seed=0))
    one, _ = place_figures.jigsaw_rows(
        RunnerStub(), PositionsStub(), images.inputs[0], range(ratios)
    )
    assert len(drawn[0]) == 8 * len(one)
    assert figure.lines[0].startswith("accuracy by mask ratio: 0.0: 75.0%")


def test_relative_map_averages_over_offsets():
    torch.manual_seed(0)
    weights = torch.rand(2, 9, 9).softmax(-1)
    maps = relative_map(weights)
    for row in range(-2, 3):
        for column in range(-2, 3):
            pairs = [
                weights[:, 3 * r + c, 3 * (r + row) + c + column]
                for r in range(3)
                for c in range(3)
                if 0 <= r + row < 3 and 0 <= c + column < 3
            ]
            expected = sum(pairs) / len(pairs)
            torch.testing.assert_close(maps[:, row + 2, column + 2], expected)


def test_mean_distance_of_attention_matches_plain_loops():
    """The mean over queries; far offsets have fewer pairs of cells than near ones."""
    torch.manual_seed(0)
    weights = (2.0 * torch.randn(2, 3, 9, 9)).softmax(-1)
    rows = attention_rows(AttentionMaps(relative_map(weights), torch.zeros(2, 3)))
    assert [(row["layer"], row["head"]) for row in rows] == [*itertools.product((1, 2), range(3))]
    for row in rows:
        own = weights[row["layer"] - 1, row["head"]].tolist()
        distances = [
            own[q][k] * math.dist(divmod(q, 3), divmod(k, 3)) for q in range(9) for k in range(9)
        ]
        assert row["mean_distance"] == pytest.approx(sum(distances) / 9, rel=1e-5)


def test_correlation_matches_numpy():
    torch.manual_seed(0)
    first, second = torch.randn(3, 4, 7), torch.randn(3, 4, 7)
    expected = np.zeros((4, 4))
    for b in range(3):
        for i in range(4):
            for j in range(4):
                expected[i, j] += np.corrcoef(first[b, i], second[b, j])[0, 1] / 3
    np.testing.assert_allclose(correlation(first, second).numpy(), expected, atol=1e-6)


def test_correlations_are_averaged_by_rounded_distance():
    torch.manual_seed(0)
    found = Correlations(*torch.rand(2, 16, 16))
    expected = {}
    for one, other in itertools.product(range(16), repeat=2):
        distance = round(math.dist(divmod(one, 4), divmod(other, 4)))
        pair = (float(found.within[one, other]), float(found.between[one, other]))
        expected.setdefault(distance, []).append(pair)
    rows = correlation_rows(found)
    assert [row["distance"] for row in rows] == sorted(expected) == [0, 1, 2, 3, 4]
    for row in rows:
        means = np.mean(expected[row["distance"]], axis=0)
        assert (row["within"], row["between"]) == pytest.approx(tuple(means))
    far = [pair for distance in (1, 2, 3, 4) for pair in expected[distance]]
    assert found.means() == pytest.approx(tuple(np.mean(far, axis=0)))


def test_neighbor_accuracy_matches_scikit_learn():
    from sklearn.neighbors import KNeighborsClassifier

    random = np.random.default_rng(0)
    centers = random.normal(size=(3, 6))
    labels = random.integers(3, size=160)
    points = (centers[labels] + 1.2 * random.normal(size=(160, 6))).astype(np.float32)
    train, held_out = points[:120], points[120:]
    center = train.mean(0)
    reference = KNeighborsClassifier(5, metric="cosine").fit(train - center, labels[:120])
    votes = reference.predict_proba(held_out - center)
    clear = (np.sort(votes)[:, -1] > np.sort(votes)[:, -2]).nonzero()[0]
    ours = neighbor_accuracy(
        torch.from_numpy(train),
        labels[:120],
        torch.from_numpy(held_out[clear]),
        labels[120:][clear],
        k=5,
    )
    expected = (reference.predict(held_out - center) == labels[120:])[clear].mean()
    assert ours == pytest.approx(expected)
    assert len(clear) > 30


def test_ties_of_neighbors_go_to_the_class_of_the_nearest():
    """Two votes each for classes 1 and 0; the nearest of all has class 2."""
    cosines, classes = (0.9, 0.8, 0.7, 0.6, 0.5), [2, 1, 0, 0, 1]
    near = torch.zeros(5, 6)
    near[:, 0] = torch.tensor(cosines)
    for place, cosine in enumerate(cosines):
        near[place, place + 1] = math.sqrt(1 - cosine**2)
    # Their mirror images centre the features.
    train, labels = torch.cat([near, -near]), np.array([*classes, *[3] * 5])
    asked = torch.eye(6)[:1]
    found = [neighbor_accuracy(train, labels, asked, np.array([n]), k=5) for n in range(3)]
    assert found == [0.0, 1.0, 0.0]
