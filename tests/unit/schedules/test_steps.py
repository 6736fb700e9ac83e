"""Generation steps against plain loops, and the arrangements used by training and features."""

import math

import pytest
import torch

from megavis.config.errors import UserError
from megavis.parallel.random import uniform
from megavis.schedules.hidden_share import HiddenShare
from megavis.schedules.masked import Context, RoundOptions, Rounds
from megavis.schedules.one_by_one import OneByOne
from megavis.schedules.one_by_one import RoundOptions as SeveralAtOnce
from megavis.schedules.orders import Orders, random_orders
from megavis.schedules.schedule import GenerationProgress, NoOptions
from megavis.schedules.segmented import GroupOptions, Groups, even_group_ends

NOTHING = GenerationProgress(None, torch.arange(2), 0)


def steps_of(schedule, order, num_given, options):
    step = schedule.first(order, num_given=num_given, options=options)
    while step is not None:
        yield step
        step = schedule.after(step, NOTHING, options)


@pytest.mark.parametrize("num_given", [0, 1, 4, 5])
def test_one_by_one_generates_positions_in_order(num_given):
    schedule = OneByOne(Orders(torch.tensor([3, 1, 0, 2, 4])))
    order = schedule.order_of(torch.arange(2), seed=7)
    assert order.tolist() == [[3, 1, 0, 2, 4]]
    found = [(s.known, s.asked, s.number, s.name) for s in steps_of(schedule, order, num_given, 0)]
    assert found == [
        (place, slice(place, place + 1), number, "token")
        for number, place in enumerate(range(num_given, 5))
    ]


@pytest.mark.parametrize("rounds", [None, 1, 2, 3, 5])
@pytest.mark.parametrize("num_given", [0, 4])
def test_several_tokens_are_asked_for_at_once(rounds, num_given):
    """RandAR, section 3.3: one token, and then up to 1 + (1 - cos(π/2 · i / r)) of the others."""
    schedule, options = OneByOne(Orders(torch.arange(9)), asks_several=True), SeveralAtOnce(rounds)
    order = schedule.order_of(torch.arange(2), seed=7)
    found = [(s.known, s.asked) for s in steps_of(schedule, order, num_given, options)]
    expected, count, passes = [], 9 - num_given, 9 - num_given if rounds is None else rounds
    place = num_given
    for number in range(1, passes + 1):
        wanted = 1 + math.floor((1 - math.cos(math.pi / 2 * number / passes)) * count)
        wanted = 1 if passes > 1 and number == 1 else wanted
        stop = place + 1 if rounds is None else min(9, max(num_given + wanted, place + 1))
        expected.append((place, slice(place, stop)))
        place = stop
    assert found == expected


@pytest.mark.parametrize("rounds", [1, 2, 3, 8])
def test_no_more_tokens_are_asked_for_than_there_are(rounds):
    """Rounding can give one token more, for 2 of 2 tokens or 4 of 4."""
    options = SeveralAtOnce(rounds)
    for count in range(1, 70):
        done, number = 0, 0
        while done < count:
            done, number = done + options.num_asked(number, done, count), number + 1
        assert done == count
        assert number <= rounds


def test_a_longer_prefix_is_given_in_grids():
    """Half of the tokens, or the prefix."""
    for prefix, share in ((0, 0.5), (2, 0.5), (4, 0.8), ("drawn", 0.5)):
        schedule = OneByOne(Orders(torch.arange(5)), prefix=prefix)
        assert schedule.given_share == share
        assert schedule.needs_given == (prefix != 0)


def test_orders_are_shared_or_drawn_per_image():
    index = torch.tensor([4, 9])
    drawn = OneByOne(Orders(torch.arange(6), seed=3))
    assert drawn.is_random
    assert torch.equal(drawn.draw(index).order, random_orders(index, 6, seed=3))
    assert drawn.for_features(torch.arange(2)).order.tolist() == [list(range(6))]
    shared = OneByOne(Orders(torch.arange(6)))
    assert not shared.is_random
    assert shared.draw(index).order.tolist() == [list(range(6))]
    arrangement = shared.draw(index)
    assert arrangement.groups.tolist() == [[1, 2, 3, 4, 5, 6]]
    # Every token is predicted, the first one too, and no row holds the last one.
    assert arrangement.prediction_targets.asked == slice(0, 6)
    assert (arrangement.num_content, arrangement.predicts_all) == (5, True)


def test_drawn_prefixes_are_uniform_and_depend_on_seed_and_sample():
    """Against a loop over the draws; each length from 1 to n - 1 is as likely."""
    schedule, index = OneByOne(Orders(torch.arange(7)), prefix="drawn", seed=5), torch.arange(6000)
    assert schedule.is_random
    assert schedule.needs_given
    arrangement = schedule.draw(index)
    lengths = (arrangement.groups == 0).sum(1)
    draws = uniform(index, 1, seed=5, purpose="prefix")[:, 0].tolist()
    assert lengths.tolist() == [1 + int(6 * draw) for draw in draws]
    counts = torch.bincount(lengths, minlength=7)
    assert counts[0] == 0
    assert ((counts[1:] - 1000).abs() < 150).all()
    for row, length in zip(arrangement.groups[:20].tolist(), lengths.tolist(), strict=False):
        assert row == [max(0, place - length + 1) for place in range(7)]
    assert torch.equal(schedule.draw(index.flip(0)).groups, arrangement.groups.flip(0))
    other = OneByOne(Orders(torch.arange(7)), prefix="drawn", seed=6).draw(index)
    assert not torch.equal(other.groups, arrangement.groups)


def test_for_features_all_tokens_are_the_drawn_prefix():
    schedule = OneByOne(Orders(torch.arange(5)), prefix="drawn", seed=5)
    assert not schedule.has_random_features
    assert schedule.for_features(torch.arange(2)).groups.tolist() == [[0] * 5]


def test_prefix_can_be_chosen_where_it_is_drawn():
    schedule, index = OneByOne(Orders(torch.arange(5)), prefix="drawn", seed=5), torch.arange(2)
    chosen = schedule.chosen(index, {"prefix": 3}, is_named=True)
    assert chosen.groups.tolist() == [[0, 0, 0, 1, 2]]
    assert torch.equal(
        schedule.chosen(index, {}, is_named=True).groups, schedule.draw(index).groups
    )
    for wrong in (0, 5, 2.5, torch.ones(2)):
        with pytest.raises(UserError, match="prefix must be a whole number from 1 to 4"):
            schedule.chosen(index, {"prefix": wrong}, is_named=True)
    assert OneByOne(Orders(torch.arange(5)), prefix=2).names == ("order",)


def test_all_given_tokens_are_the_drawn_prefix_in_generation():
    schedule = OneByOne(Orders(torch.arange(5)), prefix="drawn", seed=5)
    order = schedule.order_of(torch.arange(2), seed=7)
    steps = list(steps_of(schedule, order, 3, NoOptions()))
    assert [(step.known, step.asked) for step in steps] == [(3, slice(3, 4)), (4, slice(4, 5))]
    assert steps[0].arrangement.groups.tolist() == [[0, 0, 0, 1, 2]]
    assert len(list(steps_of(schedule, order, 1, NoOptions()))) == 4
    with pytest.raises(UserError, match="give at least one token, not 0"):
        list(steps_of(schedule, order, 0, NoOptions()))


def test_without_a_start_token_the_last_row_is_idle():
    schedule = OneByOne(Orders(torch.arange(4)), prefix=1, first_asked=1)
    arrangement = schedule.draw(torch.arange(2))
    assert arrangement.is_predicted.tolist() == [[True, True, True, False]]
    assert arrangement.prediction_targets.asked == slice(1, 5)
    assert (arrangement.num_content, arrangement.predicts_all) == (4, False)


@pytest.mark.parametrize(("num_given", "groups"), [(3, 3), (2, 1), (1, 8), (4, 2)])
def test_each_group_sees_all_earlier_groups(num_given, groups):
    schedule = Groups("random", num_tokens=9, num_groups=2, shuffled=True, seed=0)
    options, images = GroupOptions(groups), torch.tensor([4, 9])
    order = schedule.order_of(images, seed=5)
    assert torch.equal(order, random_orders(images, 9, seed=5))
    ends = even_group_ends(num_given, 9, groups)
    steps = list(steps_of(schedule, order, num_given, options))
    assert [(s.known, s.asked.stop) for s in steps] == list(zip(ends, ends[1:], strict=False))
    group = [sum(position >= end for end in ends[:-1]) for position in range(9)]
    for number, step in enumerate(steps):
        assert step.arrangement.groups.tolist() == [group]
        assert set(group[step.asked]) == {number + 1}
        assert max(group[: step.known]) == number


@pytest.mark.parametrize(
    ("count", "groups"), [(1, [1]), (2, [1]), (4, [1, 3]), (12, [1, 4, 9]), (64, [1, 4, 12])]
)
def test_columns_of_grids_complete_a_quarter_in_up_to_twelve_groups(count, groups):
    schedule = Groups("fixed", num_tokens=count, num_groups=1, shuffled=True, seed=0)
    assert [column["groups"] for column in schedule.columns] == groups
    assert schedule.given_share == 0.25


def test_even_group_ends_split_the_remaining_tokens():
    assert even_group_ends(3, 9, 3) == (3, 5, 7, 9)
    assert even_group_ends(2, 9, 1) == (2, 9)
    with pytest.raises(UserError, match=r"9 tokens, 8 of them given, .* in 2 groups; use 1 to 1"):
        even_group_ends(8, 9, 2)
    with pytest.raises(UserError, match="give at least one token"):
        even_group_ends(0, 9, 2)


def test_context_is_the_prefix_of_a_random_order():
    schedule, index = Context(8, mask_ratio=0.75, placed_ratio=0.125, seed=2), torch.arange(3)
    arrangement = schedule.draw(index)
    draws = uniform(index, 8, seed=2, purpose="context")
    expected = [sorted(range(8), key=row.__getitem__) for row in draws.tolist()]
    assert arrangement.order.tolist() == expected
    assert (arrangement.num_content, arrangement.num_placed) == (2, 1)
    assert schedule.draw(index, 0.5).num_content == 4
    features = schedule.for_features(torch.arange(2))
    assert (features.num_content, features.num_placed) == (8, 8)
    assert not features.is_predicted.any()
    assert schedule.is_random
    assert not Context(8, mask_ratio=0.0, seed=2).is_random


@pytest.mark.parametrize("cut", ["mixed", "random", "fixed"])
def test_features_can_have_orders_and_groups_of_training(cut):
    index = torch.tensor([3, 40, 41])
    plain, drawn = (
        Groups(cut, num_tokens=16, num_groups=3, shuffled=True, draws_features=draws, seed=0)
        for draws in (False, True)
    )
    expected = plain.draw(index)
    found = drawn.for_features(index)
    assert torch.equal(found.order, expected.order)
    assert torch.equal(found.groups, expected.groups)
    assert drawn.has_random_features
    # Without draws: raster order, and the same even groups for all images.
    fixed = plain.for_features(index)
    assert fixed.order.tolist() == [list(range(16))] * 3
    assert (fixed.groups == fixed.groups[:1]).all()
    assert not plain.has_random_features


def test_raster_orders_with_fixed_groups_draw_nothing_for_features():
    rule = Groups("fixed", num_tokens=16, num_groups=3, shuffled=False, draws_features=True, seed=0)
    assert not rule.has_random_features


def test_the_share_that_is_done_grows_to_one():
    """By positions, of which given ones are done, or by rounds."""
    schedule = OneByOne(Orders(torch.arange(5)))
    order = schedule.order_of(torch.arange(2), seed=7)
    shares = [schedule.share_done(step, 0) for step in steps_of(schedule, order, 2, 0)]
    assert shares == pytest.approx([2 / 5, 3 / 5, 4 / 5])
    rounds, options = (
        Rounds(
            5,
            share=HiddenShare(5, 0.0, None, 1),
            loss_average="batch",
            seed=0,
        ),
        RoundOptions(rounds=4),
    )
    step = rounds.first(order, num_given=0, options=options)
    assert rounds.share_done(step, options) == 0
    progress = GenerationProgress(torch.zeros(2, 5), torch.arange(2), 0)
    step = rounds.after(step, progress, options)
    assert rounds.share_done(step, options) == 1 / 4
