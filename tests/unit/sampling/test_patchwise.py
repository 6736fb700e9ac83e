"""Patch sampling with a cache against full passes, and its dependence on seed and options."""

import numpy as np
import pytest
import torch
from small_batches import photographs, run_layers
from tiny import tiny

from megavis.config.errors import UserError
from megavis.densities.diffusion import reverse_process, with_gamma
from megavis.parallel.random import normal
from megavis.sampling.pictures import Gallery, pixels_of
from megavis.sampling.sampler import Sampler
from megavis.schedules.one_by_one import OneByOne
from megavis.schedules.orders import Orders, gather_tokens, to_raster

CONFIG = tiny(
    "{name: darl, patch_size: 4, noise_a: 1, sampling_steps: 3}",
    model={"normalization": "layer_norm", "add_bias": True},
)
PIXELS = (-0.485 / 0.229, (1 - 0.406) / 0.225)
SHAPES = [
    # config overrides, number of given patches
    (["objective.loss=diffusion"], 0),
    (["objective.loss=diffusion", "objective.order=nested_raster"], 8),
    (["objective.loss=diffusion", "objective.order=random", "objective.two_streams=true"], 5),
    (["objective.decoder=mlp", "model.positions=sincos"], 3),
]


@pytest.fixture
def build(build_paper):
    """Build a DARL model of sixteen patches."""
    return lambda *words: build_paper(CONFIG, *words, std=0.2)


@pytest.fixture
def sampler(build, tmp_path):
    """Build a sampler of that model."""

    def sampler(*words, seed=0, **options):
        objective, inference = build(*words)
        return Sampler(inference, objective, tmp_path, options, seed=seed)

    return sampler


def sequence_of(objective, patches, order):
    """Return training inputs for patches that are already in generation order."""
    schedule, index = OneByOne(Orders(torch.arange(16))), torch.arange(len(order))
    plan = schedule.chosen(index, {"order": order}, is_named=True)
    rows = objective.asks.rows(patches, plan.prediction_targets)
    return (*rows, *objective.density.blank_inputs(objective.asks.shape_of(rows), rows[0].device))


def sample_by_full_passes(inference, objective, order, prefix, numbers, seed):
    """Run a full training pass for each patch and keep only that patch's output."""
    patches = torch.zeros(len(order), 16, 48)
    patches[:, : prefix.shape[1]] = prefix
    *before, head = inference.layers.modules
    for place in range(prefix.shape[1], 16):
        with torch.no_grad():
            state = run_layers(before, sequence_of(objective, patches, order))
            if objective.paper.loss == "mse":
                patches[:, place] = head(state)[:, place]
                continue
            output = head.outputs(state)[:, place : place + 1]
            patches[:, place] = reverse_process(
                lambda x, g, z=output: head.decode(z, with_gamma(x, g)).clamp(*PIXELS),
                lambda step, t=place: normal(
                    numbers, 48, seed=seed, purpose=f"token/{t}/step/{step}"
                )[:, None],
                torch.tensor([0, 1 / 3, 2 / 3, 1]),
            )[:, 0]
    return patches


@pytest.mark.parametrize(("words", "num_given"), SHAPES)
def test_sampling_matches_full_passes(sampler, words, num_given):
    drawing, numbers = sampler(*words, seed=2), torch.arange(4, 7)
    objective = drawing.model
    order = objective.schedule.draw(numbers).order.expand(len(numbers), -1)
    prefix = gather_tokens(objective.reads.of(photographs(3, 16)), order)[:, :num_given]
    drawn = drawing.tokens(numbers, given=prefix)
    expected = sample_by_full_passes(drawing.inference, objective, order, prefix, numbers, seed=2)
    torch.testing.assert_close(drawn, expected, rtol=1e-3, atol=1e-4)


def test_samples_are_independent_of_batch_size(sampler):
    words, images = SHAPES[2][0], photographs(3, 16)
    options = {"originals": images, "num_given": 5}
    drawing = sampler(*words, seed=1)
    at_once = drawing.to_images(drawing.sample(3, **options))
    assert torch.equal(drawing.to_images(drawing.sample(3, batch_size=2, **options)), at_once)
    given = torch.from_numpy(pixels_of(drawing.given_part(3, 5), (4, 4), images.numpy()))
    assert given.float().mean() == 5 / 16
    assert torch.equal(at_once[given], images[given])
    other = sampler(*words, seed=2)
    assert not torch.equal(other.to_images(other.sample(3, **options)), at_once)
    # Completions of one image share its order but use different draws.
    twice = drawing.to_images(drawing.sample(6, **options))
    assert torch.equal(twice[3:][given], images[given])
    assert not torch.equal(twice[3:], at_once)


def test_config_sets_the_default_temperature(sampler):
    words = ("objective.loss=diffusion", "objective.sampling_temperature=0.5")
    drawn = [sampler(*words, temperature=each).sample(2) for each in (None, 0.5, 1.0)]
    assert torch.equal(drawn[0], drawn[1])
    assert not torch.equal(drawn[0], drawn[2])


def test_given_part_covers_the_upper_rows(sampler):
    given = pixels_of(sampler().given_part(3, 8), (4, 4), photographs(3, 16).numpy())
    assert given[:, :8].all()
    assert not given[:, 8:].any()


def test_gallery_draws_a_grid(build, tmp_path):
    objective, inference = build("objective.loss=diffusion")
    picture = Gallery(objective, tmp_path).plot(inference, None, num_images=4)
    assert picture.dtype == np.uint8
    assert picture.shape == (132, 522, 3)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sampling_steps": 0}, "at least 1"),
        ({"temperature": -1.0}, "0 or more"),
        ({"top_k": 3}, "top_k does not apply to this run of darl"),
        ({"beams": 2}, "likelihoods, which a diffusion decoder lacks"),
    ],
)
def test_invalid_options_raise(sampler, options, message):
    with pytest.raises(UserError, match=message):
        sampler("objective.loss=diffusion", **options)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_images": 0}, "at least 1"),
        ({"num_images": 1, "num_given": 3}, "need the images"),
        ({"num_images": 1, "num_given": 17}, "must be in"),
        ({"num_images": 1, "originals": photographs(1, 12), "num_given": 1}, "have shape"),
    ],
)
def test_invalid_arguments_raise(sampler, arguments, message):
    with pytest.raises(UserError, match=message):
        sampler().sample(**arguments)


def test_squared_error_rejects_temperature(sampler):
    with pytest.raises(UserError, match=r"temperature does not apply .* beams, fans"):
        sampler(temperature=0.5)


def test_squared_error_rejects_beams(sampler):
    with pytest.raises(UserError, match="likelihoods, which squared error lacks"):
        sampler(beams=2)


def test_normalized_targets_cannot_be_sampled(build, tmp_path):
    objective, _ = build("objective.normalize_targets=true")
    with pytest.raises(UserError, match="lack brightness"):
        Gallery(objective, tmp_path)


def test_to_raster_restores_images(build):
    objective, _ = build(*SHAPES[2][0])
    order, patches = (
        objective.schedule.draw(torch.arange(3)).order.expand(3, -1),
        objective.reads.of(photographs(3, 16)),
    )
    assert torch.equal(
        objective.reads.to_images(to_raster(gather_tokens(patches, order), order)),
        photographs(3, 16),
    )
