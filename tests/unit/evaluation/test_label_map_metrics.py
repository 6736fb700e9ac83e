"""Panoptic quality against panopticapi's algorithm and torchmetrics, and depth errors."""

import math

import numpy as np
import pytest
import torch

from megavis.config.errors import UserError
from megavis.data.codecs.label_maps import to_pixels
from megavis.evaluation.images.pair_metrics import DepthErrors, PanopticQuality
from megavis.evaluation.images.results import Quality

NUM_CLASSES = 4


def random_truth(random, *, crowds):
    """Return a map of rectangles on void, optionally with crowd segments."""
    numbers = np.zeros((24, 30), np.int64)
    for segment in range(1, 8):
        top, left = random.integers(0, 20), random.integers(0, 24)
        label = random.integers(1, NUM_CLASSES + 1)
        crowd = 65536 * (segment == 3 and crowds)
        numbers[top : top + random.integers(2, 12), left : left + random.integers(2, 14)] = (
            label + 256 * segment + crowd
        )
    return numbers


def disturbed(random, numbers):
    """Return a prediction: shifted truth with some segments relabelled and some pixels void."""
    moved = np.roll(numbers & 65535, random.integers(-2, 3, 2), axis=(0, 1))
    for segment in random.choice(8, 2, replace=False):
        inside = moved >> 8 == segment
        moved[inside] = random.integers(0, NUM_CLASSES + 1) + 256 * segment
    moved[moved & 255 == 0] = 0
    # Predict a segment on half of the void pixels.
    moved[(moved == 0) & (random.random(moved.shape) < 0.5)] = 1 + 256 * 9
    return moved


def by_panopticapi(pairs):
    """Accumulate statistics as panopticapi's `pq_compute_single_core` does, pixel by pixel."""
    stats = {label: [0.0, 0, 0, 0] for label in range(1, NUM_CLASSES + 1)}
    for truth, predicted in pairs:
        areas, intersections = [{}, {}], {}
        for true, guess in zip(truth.flatten().tolist(), predicted.flatten().tolist(), strict=True):
            areas[0][true] = areas[0].get(true, 0) + 1
            areas[1][guess] = areas[1].get(guess, 0) + 1
            intersections[true, guess] = intersections.get((true, guess), 0) + 1
        matched = count_matched(stats, areas, intersections)
        crowds = count_missed(stats, areas[0], matched)
        for guess in areas[1]:
            if guess == 0 or guess in {b for _, b in matched}:
                continue
            shared = intersections.get((0, guess), 0)
            if guess & 255 in crowds:
                shared += intersections.get((crowds[guess & 255], guess), 0)
            if shared / areas[1][guess] <= 0.5:
                stats[guess & 255][2] += 1
    return stats


def count_matched(stats, areas, intersections):
    matched = set()
    for (true, guess), shared in intersections.items():
        if true == 0 or guess == 0 or true >= 65536 or true & 255 != guess & 255:
            continue
        union = areas[1][guess] + areas[0][true] - shared - intersections.get((0, guess), 0)
        if shared / union > 0.5:
            stats[true & 255][0] += shared / union
            stats[true & 255][1] += 1
            matched.add((true, guess))
    return matched


def count_missed(stats, areas, matched):
    crowds = {}
    for true in areas:
        if true == 0 or true in {a for a, _ in matched}:
            continue
        if true >= 65536:
            crowds[true & 255] = true
        else:
            stats[true & 255][3] += 1
    return crowds


@pytest.mark.parametrize("crowds", [False, True])
def test_panoptic_quality_matches_panopticapi(crowds):
    random = np.random.default_rng(0)
    quality, pairs = PanopticQuality(NUM_CLASSES), []
    for _ in range(30):
        truth = random_truth(random, crowds=crowds)
        pairs.append((truth, disturbed(random, truth)))
        quality.add(*map(to_pixels, pairs[-1]))
    expected = by_panopticapi(pairs)
    assert sum(row[1] for row in expected.values()) > 20
    rows = []
    for label, (overlap, matched, spurious, missed) in expected.items():
        assert min(matched, spurious, missed) > 0
        assert quality.overlaps[label] == pytest.approx(overlap)
        found = (quality.matched[label], quality.spurious[label], quality.missed[label])
        assert found == (matched, spurious, missed)
        rows.append(overlap / (matched + 0.5 * spurious + 0.5 * missed))
    assert quality.quality().pq == pytest.approx(100 * sum(rows) / NUM_CLASSES)
    some = quality.quality([2, 4])
    assert some.pq == pytest.approx(100 * (rows[1] + rows[3]) / 2)
    assert some.pq <= min(some.sq, some.rq)


def test_crowd_segments_are_ignored():
    random = np.random.default_rng(0)
    found = []
    for crowds in (False, True):
        quality, random = PanopticQuality(NUM_CLASSES), np.random.default_rng(0)
        for _ in range(30):
            truth = random_truth(random, crowds=crowds)
            quality.add(to_pixels(truth), to_pixels(disturbed(random, truth)))
        found.append((quality.matched.sum(), quality.spurious.sum(), quality.missed.sum()))
    assert all(with_crowds < without for without, with_crowds in zip(*found, strict=True))


def test_panoptic_quality_matches_torchmetrics():
    from torchmetrics.detection import PanopticQuality as Theirs

    random = np.random.default_rng(1)
    labels = set(range(1, NUM_CLASSES + 1))
    theirs = Theirs(things=labels, stuffs=set(), return_sq_and_rq=True, return_per_class=False)
    ours = PanopticQuality(NUM_CLASSES)
    for _ in range(20):
        truth = np.where((made := random_truth(random, crowds=False)) > 0, made, 1 + 256 * 20)
        guess = np.where((moved := np.roll(truth, 1, axis=1)) > 0, moved, 1 + 256 * 20)
        guess[guess >> 8 == 2] = 2 + 256 * 2
        ours.add(to_pixels(truth), to_pixels(guess))
        both = [
            torch.from_numpy(np.stack([each & 255, each >> 8], -1))[None] for each in (guess, truth)
        ]
        theirs.update(*both)
    pq, sq, rq = theirs.compute().tolist()
    found = ours.quality()
    assert 0.2 < pq < 0.95
    expected = [100 * part for part in (pq, sq, rq)]
    assert [found.pq, found.sq, found.rq] == pytest.approx(expected, rel=1e-5)


def test_panoptic_quality_of_perfect_and_empty_predictions():
    truth = to_pixels(random_truth(np.random.default_rng(2), crowds=False))
    quality = PanopticQuality(NUM_CLASSES)
    quality.add(truth, truth)
    assert (quality.quality().pq, quality.quality().rq) == (100.0, 100.0)
    nothing = PanopticQuality(NUM_CLASSES)
    nothing.add(truth, np.zeros_like(truth))
    num_present = len(np.unique(truth[..., 0])) - 1  # without void
    assert nothing.quality() == Quality(0.0, 0.0, 0.0, num_present)
    assert PanopticQuality(NUM_CLASSES).quality() == Quality(0.0, 0.0, 0.0, 0)


def test_depth_errors_match_plain_arithmetic():
    random = np.random.default_rng(3)
    errors, rows = DepthErrors(), []
    for number in range(4):
        true = random.integers(0, 120_000, (6, 7))  # up to 12 m, partly out of range
        true[0, :3] = [0, 10, 100_000]  # unmeasured, and both exclusive bounds
        guess = np.maximum(1, (true * random.uniform(0.5, 2.0, true.shape)).astype(np.int64))
        # No prediction counts as a tenth of a millimetre, and a ratio of 1.25 as too large.
        true[1, :2], guess[1, :2] = [20_000, 12_500], [0, 10_000]
        errors.add(to_pixels(true), to_pixels(guess))
        pairs = [
            (t / 10_000, max(g, 1) / 10_000)
            for t, g in zip(true.flatten().tolist(), guess.flatten().tolist(), strict=True)
            if 0.001 < t / 10_000 < 10
        ]
        assert 0 < len(pairs) < 40, number
        n = len(pairs)
        rows.append(
            [
                math.sqrt(sum((t - g) ** 2 for t, g in pairs) / n),
                sum(abs(t - g) / t for t, g in pairs) / n,
                sum(abs(math.log10(t / g)) for t, g in pairs) / n,
                *(sum(max(t / g, g / t) < 1.25**k for t, g in pairs) / n for k in (1, 2, 3)),
            ]
        )
    errors.add(to_pixels(np.zeros((2, 2), np.int64)), to_pixels(np.ones((2, 2), np.int64)))
    expected = [sum(column) / 4 for column in zip(*rows, strict=True)]
    found = errors.scores().record()
    assert list(found) == ["RMSE", "absRel", "log10", "delta1", "delta2", "delta3"]
    assert list(found.values()) == pytest.approx(expected)


def test_depths_out_of_range_are_nothing_to_compare():
    errors = DepthErrors()
    errors.add(to_pixels(np.zeros((2, 2), np.int64)), to_pixels(np.ones((2, 2), np.int64)))
    with pytest.raises(UserError, match="no image has a depth between 0.001 and 10 m"):
        errors.scores()
