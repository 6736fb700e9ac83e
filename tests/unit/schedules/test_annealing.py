"""Orders that become raster orders in the course of training."""

from types import SimpleNamespace

import pytest
import torch

from megavis.data.loading.loader import Batch
from megavis.schedules.one_by_one import Annealing, OneByOne
from megavis.schedules.orders import Orders, random_orders
from megavis.training.engine import Engine

RASTER = list(range(6))


def released_share(start, end, step):
    """The released code of RAR, with its `>` in place of `>=`: there the share is 0 either way."""
    if step < start:
        return 1.0
    if step > end:
        return 0.0
    return 1.0 - (step - start) / (end - start)


def annealed(start=100, end=300, steps=400):
    annealing = Annealing(start, end, num_steps=steps)
    return OneByOne(Orders(torch.arange(6), seed=3), annealing=annealing)


def test_the_share_falls_linearly_between_two_steps():
    annealing = Annealing(100, 300, num_steps=400)
    for step in (0, 99, 100, 101, 150, 299, 300, 301, 399):
        assert annealing.share(step) == pytest.approx(released_share(100, 300, step))
    assert annealing.last == 0


@pytest.mark.parametrize(
    ("start", "end", "shares"),
    [
        (0, 0, [0, 0, 0, 0]),
        (4, 4, [1, 1, 1, 1]),
        (2, 2, [1, 1, 0, 0]),
        (0, 4, [1, 0.75, 0.5, 0.25]),
    ],
)
def test_the_share_may_fall_at_once_or_never(start, end, shares):
    annealing = Annealing(start, end, num_steps=4)
    assert [annealing.share(step) for step in range(4)] == shares
    assert annealing.last == shares[-1]


def test_an_image_has_its_drawn_order_or_the_shared_one():
    schedule, index = annealed(), torch.arange(4000)
    drawn = random_orders(index, 6, seed=3)
    before = torch.ones(4000, dtype=torch.bool)
    for step, share in ((0, 1.0), (150, 0.75), (200, 0.5), (299, 0.005), (399, 0.0)):
        order = schedule.at(step).draw(index).order
        is_drawn = (order == drawn).all(1)
        is_raster = (order == torch.tensor(RASTER)).all(1)
        assert (is_drawn | is_raster).all()
        # One in 720 drawn orders is the raster order.
        assert is_drawn.float().mean() == pytest.approx(share, abs=0.03)
        # An image that has changed does not change back.
        assert not (is_drawn & ~before).any()
        before = is_drawn


def test_draws_do_not_depend_on_the_batch_and_shapes_not_on_the_step():
    schedule, index = annealed(), torch.arange(50)
    order = schedule.at(200).draw(index).order
    assert torch.equal(schedule.at(200).draw(index.flip(0)).order, order.flip(0))
    shapes = {schedule.at(step).draw(index).order.shape for step in (0, 200, 399)}
    assert shapes == {(50, 6)}


def test_outside_of_training_the_share_is_the_last_steps():
    schedule, index = annealed(), torch.arange(3)
    assert schedule.at(None) is schedule
    assert not schedule.is_random
    assert schedule.draw(index).order.tolist() == [RASTER] * 3
    assert schedule.order_of(index, seed=7).tolist() == [RASTER] * 3
    assert schedule.for_features(index).order.tolist() == [RASTER]
    never = annealed(400, 400)
    assert never.is_random
    assert torch.equal(never.draw(index).order, random_orders(index, 6, seed=3))


def test_other_schedules_are_the_same_in_all_steps():
    schedule = OneByOne(Orders(torch.arange(6), seed=3))
    assert schedule.at(5) is schedule


def test_a_batch_gets_the_step_of_the_trainer():
    """After a rollback the loader is ahead of the trainer, so the step is not the loader's."""
    seen = []
    engine = SimpleNamespace(
        context=SimpleNamespace(device="cpu"),
        objective=SimpleNamespace(
            training_sequence=lambda batch: (
                seen.append(batch) or SimpleNamespace(inputs=(), targets=())
            )
        ),
    )
    batch = Batch(torch.zeros(2, 4), torch.zeros(2), torch.arange(2))
    assert batch.step is None
    next(Engine._pairs(engine, iter([batch]), 17))
    assert seen[0].step == 17
    assert seen[0].unlabelled().to("cpu").step == 17
