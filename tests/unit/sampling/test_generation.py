"""Generation with a cache against whole forward passes."""

import numpy as np
import pytest
import torch

from megavis.config.errors import UserError
from megavis.parallel.random import uniform
from megavis.sampling.autoregressive import generate
from megavis.sampling.batches import given_pixels, sample_ids

SHAPES = [
    # words of the config, pixels given
    ([], 0),
    ([], 1),
    (["data.image_size=3", "model.num_layers=3", "objective.order=random"], 4),
    (["data.image_size=2", "model.num_attention_heads=4", "model.normalization=layer_norm"], 3),
    (["data.image_size=5", "model.num_attention_heads=1", "model.add_bias=true"], 12),
    (["data.image_size=3"], 9),
]


def generate_without_cache(runner, objective, prefix, choose):
    """Run the whole sequence anew for each place; what follows the place is filled with zeros."""
    ids = torch.zeros(len(prefix), objective.num_tokens, dtype=torch.int64)
    ids[:, : prefix.shape[1]] = prefix
    for place in range(prefix.shape[1], objective.num_tokens):
        inputs = objective.inputs_from(objective.to_raster(ids))
        logits = objective.outputs(runner.predictions(inputs))[:, place]
        ids[:, place] = torch.tensor(
            [choose(row, image, place) for image, row in enumerate(logits.tolist())]
        )
    return ids


def random_prefix(objective, num_given, batch_size=3):
    torch.manual_seed(4)
    return torch.randint(objective.num_outputs, (batch_size, num_given))


@pytest.mark.parametrize(("words", "num_given"), SHAPES)
def test_greedy_generation_with_a_cache_equals_whole_passes(build, tmp_path, words, num_given):
    objective, runner = build(tmp_path / "c.yaml", *words)
    prefix = random_prefix(objective, num_given)

    got = generate(runner, objective, batch_size=3, prefix=prefix, temperature=0.0)

    expected = generate_without_cache(
        runner, objective, prefix, lambda row, *_: row.index(max(row))
    )
    assert torch.equal(got, expected)


@pytest.mark.parametrize(("words", "num_given"), SHAPES)
def test_sampling_with_a_cache_equals_whole_passes(build, tmp_path, words, num_given):
    objective, runner = build(tmp_path / "c.yaml", *words)
    prefix = random_prefix(objective, num_given)
    draws = uniform(torch.arange(7, 10), objective.num_tokens, seed=5, purpose="sample")

    def choose(row, image, place):
        weights = np.exp((np.array(row) - max(row)) / 0.8)
        return int(
            np.searchsorted(np.cumsum(weights), draws[image, place] * weights.sum(), "right")
        )

    got = generate(
        runner, objective, batch_size=3, prefix=prefix, temperature=0.8, seed=5, first_image=7
    )

    assert torch.equal(got, generate_without_cache(runner, objective, prefix, choose))


def test_images_do_not_depend_on_the_batch_they_are_drawn_in(build, tmp_path):
    objective, runner = build(tmp_path / "c.yaml", "objective.order=random")
    originals = torch.randint(32, (7, 16))
    given = {"num_images": 7, "originals": originals, "num_given": 5, "seed": 1}

    at_once = sample_ids(runner, objective, batch_size=7, **given)

    assert torch.equal(sample_ids(runner, objective, batch_size=3, **given), at_once)
    kept = given_pixels(objective, 5)
    assert kept.sum() == 5
    assert torch.equal(at_once[:, kept], originals[:, kept])
    assert not torch.equal(at_once, originals)


def test_seeds_and_images_draw_differently(build, tmp_path):
    objective, runner = build(tmp_path / "c.yaml")
    first, second = (sample_ids(runner, objective, num_images=4, seed=seed) for seed in (0, 1))
    assert len({tuple(row) for row in torch.cat([first, second]).tolist()}) == 8


def test_a_bert_model_cannot_be_sampled(build, tmp_path):
    objective, runner = build(tmp_path / "c.yaml", "objective.mode=bert")
    with pytest.raises(UserError, match="bert cannot be sampled"):
        generate(runner, objective, batch_size=1)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"num_images": 0}, "at least 1"),
        ({"num_images": 1, "num_given": 3}, "needs the images"),
        ({"num_images": 2, "originals": torch.zeros(1, 16).long()}, "have shape"),
        ({"num_images": 1, "num_given": 17}, "must lie in"),
    ],
)
def test_wrong_numbers_are_refused(build, tmp_path, wrong, message):
    objective, runner = build(tmp_path / "c.yaml")
    with pytest.raises(UserError, match=message):
        sample_ids(runner, objective, **wrong)


def test_a_prefix_of_another_shape_is_refused(build, tmp_path):
    objective, runner = build(tmp_path / "c.yaml")
    with pytest.raises(ValueError, match="prefix has shape"):
        generate(runner, objective, batch_size=2, prefix=torch.zeros(3, 4).long())
