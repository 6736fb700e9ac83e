"""Patches drawn with a cache against whole passes, and what decides the draws."""

import numpy as np
import pytest
import torch
from small_batches import photographs, run_layers

from megavis.config.errors import UserError
from megavis.model.diffusion import reverse_process
from megavis.model.orders import take_places, to_raster
from megavis.objectives.darl_drawing import with_gamma
from megavis.parallel.random import normal
from megavis.sampling.gallery import PatchGallery, gallery_of
from megavis.sampling.patchwise import generate_patches, given_part, sample_patches

CONFIG = """\
name: small
objective: {name: darl, patch_size: 4, noise_a: 1, sampling_steps: 3}
model:
  num_layers: 2
  hidden_size: 16
  num_attention_heads: 2
  normalization: layer_norm
  add_bias: true
data: {train: shards/train, image_size: 16}
parallel: {zero_stage: 0}
optimizer: {learning_rate: 1e-2}
training: {steps: 3, batch_size: 8}
"""
PIXELS = (-0.485 / 0.229, (1 - 0.406) / 0.225)
SHAPES = [
    # words of the config, patches given
    (["objective.loss=diffusion"], 0),
    (["objective.loss=diffusion", "objective.order=nested_raster"], 8),
    (["objective.loss=diffusion", "objective.order=random", "objective.two_streams=true"], 5),
    (["objective.decoder=mlp", "model.positions=sincos"], 3),
]


@pytest.fixture
def build(build_paper):
    """Build a DARL of sixteen patches."""
    return lambda *words: build_paper(CONFIG, *words, std=0.2)


def drawn_by_whole_passes(runner, objective, order, prefix, numbers, seed):
    """Each patch after a whole training pass, whose other places are not looked at."""
    patches = torch.zeros(len(order), 16, 48)
    patches[:, : prefix.shape[1]] = prefix
    *before, head = runner.layers.modules
    for place in range(prefix.shape[1], 16):
        with torch.no_grad():
            state = run_layers(before, objective.inputs_of(patches, order))
            output = head.outputs(state)[:, place : place + 1]
            if objective.paper.loss == "mse":
                patches[:, place] = head.decode(output, None)[:, 0]
                continue
            patches[:, place] = reverse_process(
                lambda x, g, z=output: head.decode(z, with_gamma(x, g)).clamp(*PIXELS),
                lambda step, t=place: normal(
                    numbers, 48, seed=seed, purpose=f"patch {t} step {step}"
                )[:, None],
                torch.tensor([0, 1 / 3, 2 / 3, 1]),
            )[:, 0]
    return patches


@pytest.mark.parametrize(("words", "num_given"), SHAPES)
def test_drawing_with_a_cache_equals_whole_passes(build, words, num_given):
    objective, runner = build(*words)
    numbers = torch.arange(4, 7)
    order = objective.orders(numbers)
    prefix = take_places(objective.patches_of(photographs(3, 16)), order)[:, :num_given]
    drawn = generate_patches(runner, objective, order=order, prefix=prefix, numbers=numbers, seed=2)
    expected = drawn_by_whole_passes(runner, objective, order, prefix, numbers, seed=2)
    torch.testing.assert_close(drawn, expected, rtol=1e-3, atol=1e-4)


def test_images_do_not_depend_on_the_batch_they_are_drawn_in(build):
    objective, runner = build(*SHAPES[2][0])
    images = photographs(5, 16)
    options = {"num_images": 5, "originals": images, "num_given": 5, "seed": 1}
    at_once = sample_patches(runner, objective, **options)
    apart = sample_patches(runner, objective, batch_size=2, **options)
    # Another batch may be another kernel, whose last bit may round to the next level.
    torch.testing.assert_close(apart.int(), at_once.int(), rtol=0, atol=1)
    given = given_part(objective, images, 5)
    assert given.float().mean() == 5 / 16
    assert torch.equal(at_once[given], images[given])
    other = sample_patches(runner, objective, **{**options, "seed": 2})
    assert not torch.equal(other, at_once)


def test_the_config_names_a_temperature(build):
    objective, runner = build("objective.loss=diffusion", "objective.sampling_temperature=0.5")
    drawn = [
        sample_patches(runner, objective, num_images=2, temperature=temperature)
        for temperature in (None, 0.5, 1.0)
    ]
    assert torch.equal(drawn[0], drawn[1])
    assert not torch.equal(drawn[0], drawn[2])


def test_given_rows_are_rows(build):
    objective, _ = build()
    given = given_part(objective, photographs(3, 16), 8)
    assert given[:, :8].all()
    assert not given[:, 8:].any()


def test_pictures(build, tmp_path):
    objective, runner = build("objective.loss=diffusion")
    gallery = gallery_of(objective, tmp_path)
    assert isinstance(gallery, PatchGallery)
    picture = gallery.draw(runner, None, num_images=4)
    assert picture.dtype == np.uint8
    assert picture.shape == (132, 522, 3)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"num_images": 0}, "at least 1"),
        ({"num_images": 1, "num_steps": 0}, "at least 1"),
        ({"num_images": 1, "temperature": -1.0}, "at least 0"),
        ({"num_images": 1, "num_given": 3}, "needs the images"),
        ({"num_images": 1, "num_given": 17}, "must lie in"),
        ({"num_images": 2, "originals": photographs(1, 16)}, "2 images were asked for and 1 given"),
    ],
)
def test_wrong_numbers_are_refused(build, wrong, message):
    objective, runner = build()
    with pytest.raises(UserError, match=message):
        sample_patches(runner, objective, **wrong)


def test_normalised_targets_draw_nothing(build, tmp_path):
    objective, _ = build("objective.normalize_targets=true")
    with pytest.raises(UserError, match="no brightness"):
        gallery_of(objective, tmp_path)


def test_raster_and_back(build):
    objective, _ = build(*SHAPES[2][0])
    order, patches = objective.orders(torch.arange(3)), objective.patches_of(photographs(3, 16))
    assert torch.equal(
        objective.images_of(to_raster(take_places(patches, order), order)), photographs(3, 16)
    )
