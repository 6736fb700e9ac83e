"""Group-by-group prediction of hidden patches against explicit forward passes."""

import pytest
import torch
from compositions import GROUPS, LATENTS, MIXTURE, QUERY
from small_batches import photographs

from megavis.cli import main
from megavis.config.errors import UserError
from megavis.papers.gvp.group_figure import fill
from megavis.parallel.random import derive_seed
from megavis.sampling.pictures import pixels_of
from megavis.sampling.sampler import Sampler
from megavis.schedules.orders import gather_tokens, random_orders

NUM_GIVEN, IMAGES = 3, torch.arange(2)


@pytest.fixture
def sampler(build_gvp, tmp_path):
    """Build a GVP and its sampler."""

    def sampler(*words, **options):
        objective, inference = build_gvp(*words)
        return Sampler(inference, objective, tmp_path, options)

    return sampler


def filled(sampler, originals, **options):
    return fill(sampler, originals, IMAGES, num_given=NUM_GIVEN, **options)


def test_given_patches_stay_and_others_are_not_read(sampler):
    images, drawing = photographs(2, 12), sampler(groups=3)
    first, given = filled(drawing, images)
    assert given.sum(1).tolist() == [3, 3]
    pixels = torch.from_numpy(pixels_of(given, (3, 3), images.numpy()))
    assert pixels.sum() == 2 * 3 * 16
    assert torch.equal(first[pixels], images[pixels])
    other = torch.where(pixels[..., None], images, photographs(2, 12, seed=2))
    assert torch.equal(filled(drawing, other)[0], first)


def test_groups_condition_on_predicted_groups(sampler):
    """Each group equals one pass over the whole order with the earlier predictions filled in."""
    drawing = sampler(groups=2)
    objective, inference = drawing.model, drawing.inference
    images, order = photographs(2, 12), random_orders(IMAGES, 9, seed=0)
    drawn, _ = filled(drawing, images)
    patches = objective.tokens_of(images)
    for stop in (6, 9):
        # The paper's form: all tokens in order, all groups in one pass.
        inputs = list(objective.inputs_from(images, order=order, boundaries=(3, 6)))
        content = inputs[1]
        inputs[0] = patches.gather(1, content[..., None].expand(-1, -1, 48))
        predicted = inference.predictions(tuple(inputs))
        places = order[:, stop - 3 : stop, None].expand(-1, -1, 48)
        patches = patches.scatter(1, places, predicted[:, stop - 3 : stop])
    assert torch.equal(drawn, drawing.to_images(patches))


def test_orders_are_averaged(sampler):
    """The result is the mean over orders of single-patch groups."""
    drawing = sampler(groups=6)
    objective, inference, images = drawing.model, drawing.inference, photographs(2, 12)
    order, sums = random_orders(IMAGES, 9, seed=0), 0.0
    for number in range(3):
        patches = objective.tokens_of(images)
        for place in range(3, 9):
            inputs = objective.inputs_from(
                objective.reads.to_images(patches),
                order=order,
                boundaries=tuple(range(3, 9)),
            )
            inputs = (gather_tokens(patches, order), *inputs[1:])
            predicted = inference.predictions(inputs)[:, place]
            patches = patches.clone()
            for image in range(2):
                patches[image, order[image, place]] = predicted[image]
        sums = sums + patches
        rest = random_orders(IMAGES, 6, seed=derive_seed(0, "fill", number))
        order = torch.cat([order[:, :3], order[:, 3:].gather(1, rest)], dim=1)
    drawn, _ = filled(drawing, images, num_orders=3)
    assert torch.equal(drawn, drawing.to_images(sums / 3))
    assert not torch.equal(filled(drawing, images)[0], drawn)


def test_orders_belong_to_images_however_they_are_batched(sampler):
    drawing, images = sampler(groups=6), photographs(3, 12)
    together, _ = fill(drawing, images, torch.arange(3), num_given=NUM_GIVEN, num_orders=3)
    last, _ = fill(drawing, images[2:], torch.tensor([2]), num_given=NUM_GIVEN, num_orders=3)
    assert torch.equal(together[2:], last)


def test_given_latents_stay(build_composition, tmp_path, monkeypatch):
    """Latents `[b, c, h, w]` are given as the tokens of their grid."""
    objective, inference = build_composition(LATENTS, GROUPS, QUERY, MIXTURE)
    monkeypatch.setattr(objective, "to_images", lambda latents, folder: latents)
    latents = torch.randn(2, 4, 4, 4, generator=torch.Generator().manual_seed(0))
    images, given = filled(Sampler(inference, objective, tmp_path, {"groups": 3}), latents)
    given = given.view(2, 1, 4, 4).expand_as(latents)
    assert torch.equal(images[given], latents[given])
    assert (images != latents)[~given].all()


def test_ids_are_not_averaged(sampler, monkeypatch):
    ids = torch.randint(8, (2, 9), generator=torch.Generator().manual_seed(0))
    drawing = sampler("objective.variant=d2d", "objective.vocabulary_size=8", groups=2)
    with pytest.raises(UserError, match="ids cannot be averaged"):
        filled(drawing, ids, num_orders=2)
    monkeypatch.setattr(drawing.model, "to_images", lambda tokens, folder: tokens)
    found = filled(drawing, ids)[0]
    assert torch.equal(found, drawing.sample(2, originals=ids, num_given=NUM_GIVEN))
    assert found.dtype == torch.int64


def test_unconditional_generation_is_refused(sampler):
    with pytest.raises(UserError, match="runs of gvp cannot generate images without given tokens"):
        sampler().balanced_images(IMAGES)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["objective.normalize_targets=true"], "normalize_targets"),
        (
            ["objective.variant=p2d", "objective.vocabulary_size=8", "objective.tokenizer=none"],
            "reads patches and predicts ids",
        ),
    ],
)
def test_unsupported_options_are_refused(sampler, words, message):
    with pytest.raises(UserError, match=message):
        sampler(*words)


def test_ids_are_sampled_group_by_group(sampler):
    """In d2d each group reads the ids sampled before it, and given ids stay."""
    words = ("objective.variant=d2d", "objective.vocabulary_size=8")
    ids = torch.randint(8, (2, 9), generator=torch.Generator().manual_seed(0))
    drawing = sampler(*words, groups=3, temperature=0.9)
    given = drawing.given_part(2, NUM_GIVEN)
    drawn = drawing.sample(2, originals=ids, num_given=NUM_GIVEN)
    assert torch.equal(drawn[given], ids[given])
    assert not torch.equal(drawn, ids)
    greedy = sampler(*words, groups=3, temperature=0.0)
    order = random_orders(IMAGES, 9, seed=0)
    expected = ids.clone()
    for stop in (5, 7, 9):
        inputs = greedy.model.inputs_from(expected, order=order, boundaries=(3, 5, 7))
        logits = greedy.model.outputs(greedy.inference.predictions(inputs))
        best = logits.argmax(-1)[:, stop - 2 : stop]
        expected = expected.scatter(1, order[:, stop - 2 : stop], best)
    assert torch.equal(greedy.sample(2, originals=ids, num_given=NUM_GIVEN), expected)


@pytest.mark.parametrize("share", ["nan", "-0.1"])
def test_share_must_be_a_number(share, tmp_path, capsys):
    assert main(["figure", "groups", str(tmp_path), f"--share={share}"]) == 2
    assert f"--share: '{share}' is not a number of 0 or more" in capsys.readouterr().err
