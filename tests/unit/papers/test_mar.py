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
    # As in the released code, the first step divides by a γ near 0.
    objective, inference = make("objective.sampling_steps=5", "objective.least_signal=1e-12")
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


def test_little_training_draws_what_was_seen(build_paper, tmp_path):
    """The first step of generation does not multiply the errors of a network that is not converged.

    A latent is s · (1, t) and noise of deviation 0.2, with a random sign s that an image's latents
    share, and t = 1 or -1 by its class.
    """
    text = tiny(
        "{name: mar, latent_channels: 2, downsampling: 4, num_classes: 2, class_rows: 2,"
        " denoiser_layers: 2, denoiser_width: 64, least_masking: 0.25, sampling_steps: 50,"
        " decoder: {num_layers: 2, hidden_size: 48, num_attention_heads: 2}}",
        model={**VIT, "num_layers": 2, "hidden_size": 48, "num_attention_heads": 2},
        data={"image_size": 8},
    )
    objective, inference = build_paper(text, std=None)
    modules = torch.nn.ModuleList(inference.layers.modules)
    optimizer = torch.optim.Adam(modules.parameters(), lr=3e-3, betas=(0.9, 0.95))
    count, generator = 128, torch.Generator().manual_seed(0)
    for step in range(150):
        labels, signs = torch.randint(2, (2, count), generator=generator)
        latents = directions(labels) * (2.0 * signs - 1)[:, None, None]
        latents = latents + 0.2 * torch.randn(count, 4, 2, generator=generator)
        index = torch.arange(step * count, (step + 1) * count)
        sequence = objective.training_sequence(
            Batch(latents.transpose(1, 2).unflatten(2, (2, 2)), labels, index)
        )
        loss = objective.loss(run_layers(modules, sequence.inputs), sequence.targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    labels = torch.arange(count) % 2
    sampler = Sampler(inference, objective, tmp_path, {"rounds": 4})
    found = sampler.tokens(torch.arange(count), conditions={"labels": labels})
    signs = (found * directions(labels)).mean(-1).sign()
    assert (signs.sum(1).abs() == 4).double().mean() > 0.95
    deviation = (found - signs[..., None] * directions(labels)).std()
    assert 0.1 < deviation < 0.3
    assert 0.3 < (signs > 0).double().mean() < 0.7


def directions(labels):
    """Return (1, 1) for class 0 and (1, -1) for class 1: `[b, 1, 2]`."""
    return torch.stack([torch.ones(len(labels)), 1.0 - 2.0 * labels], dim=1)[:, None]


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
