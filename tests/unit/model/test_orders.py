"""Generation orders against loops that follow the paper's text."""

import pytest
import torch

from megavis.schedules.orders import (
    fixed_order,
    gather_tokens,
    order_of_run,
    random_orders,
    to_raster,
)

SIDE = 16


def blocks_in_raster_order(side, block):
    """Yield the cells of each block in raster order."""
    for top in range(0, side, block):
        for left in range(0, side, block):
            yield [
                row * side + column
                for row in range(top, top + block)
                for column in range(left, left + block)
            ]


def nested_raster(side, block):
    """Order the blocks in raster order; order the patches within each in raster order."""
    return [cell for cells in blocks_in_raster_order(side, block) for cell in cells]


def round_robin(side, block):
    """One patch is selected from each block; cycle through the blocks repeatedly."""
    waiting = list(blocks_in_raster_order(side, block))
    order = []
    while any(waiting):
        order += [cells.pop(0) for cells in waiting]
    return order


@pytest.mark.parametrize("block", [2, 4, 8])
@pytest.mark.parametrize(
    ("kind", "loop"), [("nested_raster", nested_raster), ("round_robin", round_robin)]
)
def test_fixed_orders_match_plain_loops(kind, loop, block):
    order = fixed_order(kind, height=SIDE, width=SIDE, block=block)
    assert order.tolist() == loop(SIDE, block)
    assert sorted(order.tolist()) == list(range(SIDE * SIDE))


def test_raster_order_is_the_identity():
    assert fixed_order("raster", height=3, width=5).tolist() == list(range(15))


def test_fixed_orders_on_a_rectangular_grid():
    assert fixed_order("nested_raster", height=2, width=4, block=2).tolist() == [
        0,
        1,
        4,
        5,
        2,
        3,
        6,
        7,
    ]
    assert fixed_order("round_robin", height=2, width=4, block=2).tolist() == [
        0,
        2,
        1,
        3,
        4,
        6,
        5,
        7,
    ]


def test_orders_of_a_run():
    """A kind, a list, or one random order, which is a function of the seed alone."""
    grid = {"height": 4, "width": 6, "block": 2}
    assert order_of_run("raster", **grid, seed=3).tolist() == list(range(24))
    for kind in ("nested_raster", "round_robin"):
        assert torch.equal(order_of_run(kind, **grid, seed=3), fixed_order(kind, **grid))
    assert order_of_run((2, 0, 1), height=1, width=3, block=2, seed=3).tolist() == [2, 0, 1]
    first, again, other = (order_of_run("random", **grid, seed=seed) for seed in (3, 3, 4))
    assert first.sort().values.tolist() == list(range(24))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_indivisible_block_raises():
    with pytest.raises(ValueError, match="do not divide"):
        fixed_order("round_robin", height=14, width=14, block=4)


def test_random_orders_are_distinct_permutations_per_sample():
    index = torch.arange(200)
    orders = random_orders(index, 36, seed=3)
    assert torch.equal(orders.sort(dim=1).values, torch.arange(36).expand(200, -1))
    assert len({tuple(order) for order in orders.tolist()}) == 200
    assert torch.equal(random_orders(index[7:9], 36, seed=3), orders[7:9])
    # The first cell is uniform: 200 draws over 36 cells, 5.6 each on average.
    counts = torch.bincount(orders[:, 0], minlength=36)
    assert counts.max() < 18


@pytest.mark.parametrize("trailing", [(), (5,)])
def test_to_raster_inverts_gather_tokens(trailing):
    values = torch.randn(3, 12, *trailing, generator=torch.Generator().manual_seed(0))
    for order in (
        fixed_order("round_robin", height=4, width=3, block=1),
        random_orders(torch.arange(3), 12, seed=0),
    ):
        placed = gather_tokens(values, order)
        rows = order.expand(3, -1)
        for image in range(3):
            for place in range(12):
                assert torch.equal(placed[image, place], values[image, rows[image, place]])
        assert torch.equal(to_raster(placed, order), values)
