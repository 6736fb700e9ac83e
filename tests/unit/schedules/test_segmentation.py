"""Orders and groups against the pseudocode of the paper's appendix B and its examples."""

import itertools
import statistics

import pytest
import torch

from megavis.config.errors import UserError
from megavis.grammar.boundaries import boundaries_error, fixed_boundaries
from megavis.schedules import segmented
from megavis.schedules.orders import check_order, random_orders

pytestmark = pytest.mark.once

SAMPLES = 20_000


def draw(kind, num_tokens, num_groups, count=SAMPLES, first=0):
    index = torch.arange(first, first + count)
    cut = {"num_tokens": num_tokens, "num_groups": num_groups, "shuffled": False}
    groups = segmented.Groups(kind, **cut, seed=0).draw(index).groups
    # Where the next position is in another group.
    ends = (groups.diff(dim=1, prepend=torch.zeros(count, 1, dtype=torch.int64)) > 0).nonzero()
    return ends[:, 1].view(count, num_groups)


def assert_equally_often(rows, expected):
    """Check that exactly `expected` occurs, each within five standard deviations of its share."""
    counts = dict.fromkeys(expected, 0)
    for row in rows:
        counts[tuple(row)] += 1
    share = 1 / len(counts)
    deviation = (len(rows) * share * (1 - share)) ** 0.5
    assert max(abs(c - len(rows) * share) for c in counts.values()) < 5 * deviation


def test_orders_are_uniform_permutations():
    order = random_orders(torch.arange(SAMPLES), 4, seed=0)
    assert_equally_often(order.tolist(), itertools.permutations(range(4)))


def test_random_length_boundaries_are_uniform():
    rows = draw("random", 6, 3).tolist()
    assert_equally_often(rows, itertools.combinations(range(1, 6), 3))


def test_mixed_length_draws_last_boundary_from_clamped_normal():
    num_tokens, num_groups = 16, 4
    rows = draw("mixed", num_tokens, num_groups).tolist()
    share = statistics.NormalDist(0.5, 0.1)
    for last in range(num_groups, num_tokens):
        # Values that round below K are clamped to K, those above T - 1 to T - 1.
        low = 0.0 if last == num_groups else share.cdf((last - 0.5) / num_tokens)
        high = 1.0 if last == num_tokens - 1 else share.cdf((last + 0.5) / num_tokens)
        expected = SAMPLES * (high - low)
        count = sum(row[-1] == last for row in rows)
        assert abs(count - expected) <= 5 * max(expected, 1.0) ** 0.5
    before_eight = [row[:-1] for row in rows if row[-1] == 8]
    assert_equally_often(before_eight, itertools.combinations(range(1, 8), num_groups - 1))


@pytest.mark.parametrize("num_groups", [1, 5, 14, 15])
def test_clamped_boundaries_are_valid(num_groups):
    for kind in ("random", "mixed"):
        for row in draw(kind, 16, num_groups, count=500).tolist():
            assert len(row) == num_groups
            assert boundaries_error(row, 16) is None


@pytest.mark.parametrize(
    ("num_tokens", "num_groups", "expected"),
    [
        (196, 1, [98]),
        (196, 5, [32, 65, 98, 130, 163]),
        (10, 3, [2, 5, 7]),
        (196, 196, list(range(196))),
    ],
)
def test_fixed_length_boundaries_follow_the_formula(num_tokens, num_groups, expected):
    rows = draw("fixed", num_tokens, num_groups, count=2)
    assert rows.tolist() == [expected, expected]
    assert fixed_boundaries(num_tokens, num_groups) == tuple(expected)


def test_draws_depend_only_on_the_sample_index():
    for kind in ("random", "mixed"):
        assert torch.equal(draw(kind, 16, 5, count=9)[4:], draw(kind, 16, 5, count=5, first=4))


@pytest.mark.parametrize("num_groups", [1, 4, 15])
def test_typical_boundaries_are_valid(num_groups):
    for kind in ("fixed", "random", "mixed"):
        row = segmented.typical_boundaries(kind, 16, num_groups)
        assert boundaries_error(row, 16) is None
    assert segmented.typical_boundaries("mixed", 196, 20)[-1] == 98


def test_groups_match_the_example_of_appendix_a():
    # Appendix A: G_0 = [1], G_1 = [2, 3], G_2 = [4, 5].
    assert segmented.groups_of(torch.tensor([[1, 3]]), 5).tolist() == [[0, 1, 1, 2, 2]]
    assert segmented.groups_of(torch.tensor([[0, 1, 2]]), 3).tolist() == [[1, 2, 3]]


@pytest.mark.parametrize("boundaries", [[], [3, 2], [2, 2], [-1, 2], [2, 5]])
def test_invalid_boundaries_are_reported(boundaries):
    assert str(boundaries) in boundaries_error(boundaries, 5)


@pytest.mark.parametrize("order", [[[0, 1, 1]], [[0, 1]], [[1, 2, 3]], [0, 1, 2]])
def test_order_that_is_not_a_permutation_raises(order):
    with pytest.raises(UserError, match="permutation of the 3 tokens"):
        check_order(torch.tensor(order), 3, num_images=1)


@pytest.mark.parametrize("cut", ["random", "mixed"])
def test_orders_and_groups_of_features(cut):
    """Raster order and even groups, or with `draws_features` what training draws for the sample."""
    index, options = torch.arange(6), {"num_tokens": 16, "num_groups": 4, "seed": 3}
    even = segmented.Groups(cut, shuffled=True, **options)
    drawn = segmented.Groups(cut, shuffled=True, draws_features=True, **options)
    assert (even.has_random_features, drawn.has_random_features) == (False, True)
    plain, trained, found = even.for_features(index), even.draw(index), drawn.for_features(index)
    assert plain.order.tolist() == [list(range(16))] * 6
    assert (plain.groups == plain.groups[0]).all()
    assert torch.equal(found.order, trained.order)
    assert torch.equal(found.groups, trained.groups)
    assert not torch.equal(found.order, plain.order)


@pytest.mark.parametrize("cut", ["fixed", "random", "mixed"])
@pytest.mark.parametrize("num_groups", [1, 4, 10])
def test_the_expected_number_of_predicted_tokens_is_the_mean_of_those_drawn(cut, num_groups):
    rule = segmented.Groups(cut, num_tokens=16, num_groups=num_groups, shuffled=True, seed=0)
    index = torch.arange(SAMPLES)
    counts = rule.draw(index).is_predicted.sum(1)
    drawn = rule.num_predicted(index)
    assert torch.equal(counts.float(), drawn)
    five_deviations = 5 * float(drawn.std()) / SAMPLES**0.5
    assert abs(rule.expected_predicted - float(drawn.double().mean())) <= five_deviations + 1e-9
