"""Filling in group by group, against forward passes made by hand."""

import pytest
import torch
from small_batches import photographs

from megavis.config.errors import UserError
from megavis.model.orders import random_orders
from megavis.parallel.random import derive_seed
from megavis.sampling.groupwise import GroupByGroup, evenly, fill, patches_to_pixels

SHARE = 1 / 3


@pytest.fixture
def model(build_gvp):
    return build_gvp()


def assert_same_levels(images, expected):
    """Compare uint8 images; a last bit of another kernel may round to the next level."""
    torch.testing.assert_close(images.int(), expected.int(), rtol=0, atol=1)


def test_groups_are_of_one_size():
    assert evenly(3, 9, 3) == (3, 5, 7, 9)
    assert evenly(2, 9, 1) == (2, 9)
    with pytest.raises(UserError, match=r"9 patches of which 8 .* in 2 groups; .* 1 to 1"):
        evenly(8, 9, 2)


def test_what_is_given_stays_and_the_rest_is_never_looked_at(model):
    objective, runner = model
    assert isinstance(objective, GroupByGroup)
    images = photographs(2, 12)
    filled = fill(runner, objective, images, share_given=SHARE, num_groups=3)
    assert filled.given.sum(1).tolist() == [3, 3]
    pixels = patches_to_pixels(filled.given, 12, 12)
    assert pixels.sum() == 2 * 3 * 16
    assert torch.equal(filled.images[pixels], images[pixels])
    other = torch.where(pixels[..., None], images, photographs(2, 12, seed=2))
    again = fill(runner, objective, other, share_given=SHARE, num_groups=3)
    assert torch.equal(again.images, filled.images)


def test_each_group_sees_what_was_predicted_before(model):
    """All of z at once: g of a group sees h of the groups before, predicted patches among them."""
    objective, runner = model
    images, order = photographs(2, 12), random_orders(torch.arange(2), 9, seed=0)
    filled = fill(runner, objective, images, share_given=SHARE, num_groups=2)
    patches = objective.patches_of(images)
    for stop in (6, 9):
        # The paper's own form: every token in the order, all groups at once.
        inputs = list(objective.inputs_from(images, order=order, boundaries=(3, 6)))
        content = inputs[1]
        inputs[0] = patches.gather(1, content[..., None].expand(-1, -1, 48))
        predicted = runner.predictions(tuple(inputs))
        places = order[:, stop - 3 : stop, None].expand(-1, -1, 48)
        patches = patches.scatter(1, places, predicted[:, stop - 3 : stop])
    assert_same_levels(filled.images, objective.images_of(patches))


def test_orders_are_averaged(model):
    """Of one hidden patch a group, the second and later orders predict otherwise than the first."""
    objective, runner = model
    images = photographs(2, 12)

    def filled(num_groups, num_orders):
        options = {"share_given": SHARE, "num_groups": num_groups, "num_orders": num_orders}
        return fill(runner, objective, images, **options).images

    assert torch.equal(filled(1, 3), filled(1, 1)), "all at once no order is left"
    order, sums = random_orders(torch.arange(2), 9, seed=0), 0.0
    for number in range(3):
        patches = objective.patches_of(images)
        for place in range(3, 9):
            ends = tuple(range(3, place + 2))
            predicted = runner.predictions(objective.inputs_of_group(patches, order, ends))
            patches = patches.clone()
            for image in range(2):
                patches[image, order[image, place]] = predicted[image, 0]
        sums = sums + patches
        rest = random_orders(torch.arange(2), 6, seed=derive_seed(0, "fill", number))
        order = torch.cat([order[:, :3], order[:, 3:].gather(1, rest)], dim=1)
    assert_same_levels(filled(6, 3), objective.images_of(sums / 3))


def test_standardised_patches_make_no_picture(build_gvp):
    objective, runner = build_gvp("objective.normalize_targets=true")
    with pytest.raises(UserError, match="normalize_targets"):
        fill(runner, objective, photographs(2, 12), share_given=SHARE, num_groups=2)
