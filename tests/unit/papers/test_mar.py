"""MAR against the equations of its released code in plain torch, on the same random weights."""

import math

import pytest
import torch
from mar_equations import (
    BUFFER,
    CHANNELS,
    CLASSES,
    HEADS,
    LAYERS,
    MLP,
    MLP_LAYERS,
    TOKENS,
    UPPER,
    UPPER_HEADS,
    WIDTH,
    batch,
    check_loss,
    conditions,
    released,
    sampled,
)
from released_tensors import copy_named
from small_batches import run_layers
from tiny import VIT, tiny

from megavis.config.errors import UserError
from megavis.data.loading.loader import Batch
from megavis.densities.density import SamplingKeys
from megavis.sampling.sampler import Sampler
from megavis.weights.mar import mar_table
from megavis.weights.tables import read_table

pytestmark = pytest.mark.once

CONFIG = tiny(
    f"{{name: mar, latent_channels: {CHANNELS}, downsampling: 4, num_classes: {CLASSES},"
    f" class_rows: {BUFFER}, denoiser_layers: {MLP_LAYERS}, denoiser_width: {MLP},"
    f" decoder: {{num_layers: {LAYERS}, hidden_size: {UPPER},"
    f" num_attention_heads: {UPPER_HEADS}}}}}",
    model={**VIT, "num_layers": LAYERS, "hidden_size": WIDTH, "num_attention_heads": HEADS},
)


@pytest.fixture
def make(build_paper):
    """Build a model of sixteen latents."""
    return lambda *words: build_paper(CONFIG, *words, std=0.2)


def ours(tensors):
    """Return the same weights under our names."""
    table = mar_table(
        class_rows=BUFFER,
        num_layers=LAYERS,
        num_heads=HEADS,
        decoder_layers=LAYERS,
        decoder_heads=UPPER_HEADS,
        denoiser_layers=MLP_LAYERS,
    )
    return read_table(table, tensors)


# Equal to it.


def test_loss_equals_the_released_equations(make):
    """Images show different numbers of latents, and some have no class."""
    tensors = released()
    objective, inference = make("objective.label_dropout=0.5")
    copy_named(inference, ours(tensors))
    check_loss(objective, inference, tensors)


@pytest.mark.parametrize(("rounds", "scale"), [(3, 1.0), (4, 3.0), (TOKENS, 2.0)])
def test_samples_equal_the_released_loop(make, tmp_path, monkeypatch, rounds, scale):
    """Rounds along an order, with guidance that grows linearly; all noise is zero."""
    tensors = released()
    objective, inference = make("objective.sampling_steps=5")
    copy_named(inference, ours(tensors))

    def zeros(self, purpose, count):
        return torch.zeros(self.num_tokens, count)

    monkeypatch.setattr(SamplingKeys, "normal", zeros)
    options = {"rounds": rounds, "guidance": scale - 1}
    options |= {"guidance_schedule": "linear"} if scale > 1 else {}
    sampler = Sampler(inference, objective, tmp_path, options)
    images, labels = torch.arange(2), torch.tensor([3, 1])
    order = sampler.order_of(images)
    found = sampler.tokens(images, conditions={"labels": labels})
    for image, label in enumerate(labels.tolist()):
        latents, masked = torch.zeros(TOKENS, CHANNELS), TOKENS
        for number in range(rounds):
            places = order[image].tolist()
            shown = places[: TOKENS - masked]
            z, free = (conditions(tensors, latents, shown, each) for each in (label, None))
            left = math.floor(TOKENS * math.cos(math.pi / 2 * (number + 1) / rounds))
            left = max(1, min(masked - 1, left))
            now = 1 + (scale - 1) * (TOKENS - left) / TOKENS
            end = TOKENS if number == rounds - 1 else TOKENS - left
            for place in places[TOKENS - masked : end]:
                latents[place] = sampled(tensors, z[place], free[place], now, 5)
            masked = left
        expected = latents[order[image]]
        torch.testing.assert_close(found[image], expected, rtol=1e-3, atol=1e-4)


def test_hidden_latents_do_not_reach_the_known_ones(make):
    """The encoder has rows for as many latents as any image shows, some of which are hidden."""
    objective, inference = make()
    samples = batch(8)
    arrangement = objective.schedule.draw(samples.sample_index)
    assert arrangement.num_content == TOKENS - math.ceil(0.7 * TOKENS)

    def predictions(latents):
        changed = Batch(latents, samples.labels, samples.sample_index)
        sequence = objective.training_sequence(changed)
        noisy = objective.training_sequence(samples).inputs[4]
        inputs = (*sequence.inputs[:4], noisy)
        with torch.no_grad():
            return run_layers(inference.layers.modules, inputs)

    hidden = torch.zeros(8, TOKENS, dtype=torch.bool)
    hidden.scatter_(1, arrangement.order, arrangement.groups > 0)
    assert hidden.sum(1).unique().numel() > 1
    other = torch.where(hidden.view(8, 1, 4, 4), samples.inputs + 3.0, samples.inputs)
    torch.testing.assert_close(predictions(samples.inputs), predictions(other))
    seen = torch.where(hidden.view(8, 1, 4, 4), samples.inputs, samples.inputs + 3.0)
    assert (predictions(samples.inputs) - predictions(seen)).abs().max() > 1e-3


def test_latents_are_scaled(make):
    objective, _ = make("objective.latent_scale=0.25")
    latents = batch().inputs
    tokens = objective.given(objective.tokens_of(latents))
    torch.testing.assert_close(tokens, 0.25 * latents.flatten(2).transpose(1, 2))
    torch.testing.assert_close(objective.reads.from_sequence(tokens), latents)


# Keys.


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["objective.downsampling=5"], "5 does not divide data.image_size 16"),
        (["objective.downsampling=16"], "set it to half of data.image_size or less"),
        (
            ["objective.least_masking=0.99"],
            r"objective.least_masking: 0.99 hides all 16 tokens",
        ),
        (
            ["objective.decoder.hidden_size=18"],
            "objective.decoder.hidden_size: 18 is not divisible",
        ),
        (["model.positions=rope_2d"], "rope_2d does not reach the decoder"),
    ],
)
def test_incompatible_keys(make, words, message):
    with pytest.raises(UserError, match=message):
        make(*words)
