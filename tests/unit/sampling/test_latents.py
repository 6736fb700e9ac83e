"""GIVT's samplers on small random models, against plain ways of doing the same."""

from collections import Counter

import numpy as np
import pytest
import torch

from megavis.config.errors import UserError
from megavis.config.load import load_config
from megavis.data.batch import Batch
from megavis.model.encoder import Encoder
from megavis.model.runner import Runner
from megavis.model.stack import LocalLayers, Stack
from megavis.model.visibility import KeyValueCache
from megavis.objectives import OBJECTIVES, objective_configs
from megavis.sampling.continuous import generate_tokens
from megavis.sampling.densities import TokenChoice
from megavis.sampling.guidance import Acceptance
from megavis.sampling.latent_pictures import LatentPictures
from megavis.sampling.latents import LatentSampler
from megavis.sampling.maskgit import MaskGITSchedule

CONFIG = """\
name: tiny
objective: {name: givt, latent_channels: 2, downsampling: 8, num_classes: 3, num_components: 2}
model: {num_layers: 2, hidden_size: 16, num_attention_heads: 2, normalization: layer_norm}
data: {train: shards/train, image_size: 32}
optimizer: {learning_rate: 1e-3}
training: {steps: 3, batch_size: 8}
"""
ENCODER = (
    "objective.name=givt_encoder_decoder",
    "objective.num_classes=0",
    "objective.encoder_layers=1",
    "objective.encoder_patch_size=8",
)
LABELS, IMAGES = torch.tensor([0, 1, 2]), torch.tensor([5, 6, 7])


@pytest.fixture
def make(context, tmp_path):
    """Build a sampler of a tiny random model."""

    def make(*words, **options):
        path = tmp_path / "tiny.yaml"
        path.write_text(CONFIG)
        config = load_config(path, words, objectives=objective_configs()).config
        objective = OBJECTIVES[config.objective.name](config, context)
        plans = objective.layer_plans()
        layers = LocalLayers(plans, list(Stack(plans, objective.loss).layers))
        torch.manual_seed(0)
        for _, parameter in layers.named_parameters():
            torch.nn.init.normal_(parameter, std=0.2)
        return LatentSampler(Runner(layers, context), objective, **options)

    return make


@pytest.mark.parametrize(
    "choice", [TokenChoice(scale=0.9, probability=2.0), TokenChoice(guidance=0.4)]
)
def test_the_cache_changes_no_sample(make, choice):
    sampler = make("objective.adapter_blocks=1")
    rows = sampler.objective.label_rows(LABELS, 3, torch.device("cpu"))
    options = {"choice": choice, "seed": 3}
    drawn = [
        generate_tokens(
            sampler.runner,
            sampler.objective,
            rows,
            IMAGES,
            cached=cached,
            acceptance=Acceptance(),
            **options,
        )
        for cached in (True, False)
    ]
    torch.testing.assert_close(drawn[0], drawn[1], rtol=0, atol=1e-5)


@pytest.mark.parametrize("choice", [TokenChoice(), TokenChoice(num_beams=2, num_fans=2)])
def test_an_image_is_encoded_once_and_the_cache_changes_no_prediction(make, choice, monkeypatch):
    sampler = make(*ENCODER, "objective.adapter_blocks=1", choice=choice, seed=3)
    seen = torch.rand(3, 32, 32, 3, generator=torch.Generator().manual_seed(0)) * 2 - 1
    counts = Counter()
    _count_calls(monkeypatch, Encoder, "forward", counts)
    _count_calls(monkeypatch, KeyValueCache, "fixed", counts)
    drawn = sampler.tokens(LABELS, IMAGES, seen=seen)
    # Two blocks, sixteen tokens.
    assert counts == {"forward": 1, "fixed": 2 * 16}
    objective = sampler.objective
    memory = sampler.runner.on_first_stage(lambda layer: layer.memory(seen))
    rows = objective.label_rows(LABELS, 3, torch.device("cpu"))
    options = {"choice": choice, "seed": 3, "acceptance": Acceptance(), "memory": memory}
    whole = generate_tokens(sampler.runner, objective, rows, IMAGES, cached=False, **options)
    torch.testing.assert_close(drawn, whole, rtol=0, atol=1e-5)
    other = sampler.tokens(LABELS, IMAGES, seen=seen.flip(0))
    # The one in the middle sees the same image; the others do not.
    torch.testing.assert_close(other[1], drawn[1], rtol=0, atol=1e-5)
    assert not torch.isclose(other[0], drawn[0], rtol=0, atol=1e-2).all()


def test_predictions_stand_beside_image_and_target(make, monkeypatch):
    sampler = make(*ENCODER, "objective.tokenizer=none", seed=1)
    colours = torch.arange(12, dtype=torch.uint8).view(2, 2, 1, 1, 3) * 20
    examples = Batch(colours.expand(2, 2, 32, 32, 3), torch.tensor([-1, -1]), torch.arange(2))
    asked = []

    def decode(latents):
        asked.append(latents)
        return torch.full((len(latents), 32, 32, 3), 7, dtype=torch.uint8)

    monkeypatch.setattr(sampler.objective, "decode", decode)
    grid = LatentPictures(sampler).predictions(examples, num_drawn=2, batch_size=3)
    # Images of 32², enlarged four times, with lines of two pixels between them.
    assert grid.shape == (2 * 130 + 2, 4 * 130 + 2, 3)
    corners = grid[4::130, 4::130][:2, :4]
    assert np.array_equal(corners[:, :2], colours.flatten(2).numpy())
    assert (corners[:, 2:] == 7).all()
    alone = sampler.draw(torch.tensor([-1]), torch.tensor([3]), seen=examples.inputs[1:, 0])
    torch.testing.assert_close(torch.cat(asked)[3:], alone, rtol=0, atol=1e-5)


def _count_calls(monkeypatch, kind, name, counts):
    function = getattr(kind, name)

    def counted(*arguments):
        counts[name] += 1
        return function(*arguments)

    monkeypatch.setattr(kind, name, counted)


@pytest.mark.parametrize("name", ["givt", "givt_maskgit"])
def test_a_sample_depends_on_its_number_alone(make, name):
    sampler = make(f"objective.name={name}", choice=TokenChoice(guidance=0.3), seed=1)
    together = sampler.draw(LABELS, IMAGES)
    apart = torch.cat([sampler.draw(LABELS[i : i + 1], IMAGES[i : i + 1]) for i in range(3)])
    assert together.shape == (3, 2, 4, 4)
    torch.testing.assert_close(together, apart, rtol=0, atol=1e-5)
    assert sampler.acceptance.share_found > 0.99


def test_beam_search_goes_on_from_the_likeliest(make):
    sampler = make(choice=TokenChoice(num_beams=3, num_fans=4))
    objective = sampler.objective

    def log_likelihood(tokens):
        predictions = sampler.runner.predictions(objective.inputs_from(tokens, labels=LABELS))
        return -objective.nats(predictions, (tokens,)).sum(1)

    found = log_likelihood(sampler.tokens(LABELS, IMAGES))
    plain = log_likelihood(sampler.with_choice(num_beams=1, num_fans=1).tokens(LABELS, IMAGES))
    assert bool((found > plain).all())


def test_beams_of_one_fan_are_plain_samples_kept_by_likelihood(make):
    sampler = make(choice=TokenChoice(num_beams=4, num_fans=1))
    assert torch.isfinite(sampler.tokens(LABELS, IMAGES)).all()


def test_a_smaller_scale_draws_nearer_to_the_means(make):
    wide, narrow = (make(choice=TokenChoice(scale=s)).tokens(LABELS, IMAGES) for s in (1.0, 0.0))
    again = make(choice=TokenChoice(scale=0.0), seed=0).tokens(LABELS, IMAGES)
    assert torch.equal(narrow, again)
    assert wide.std() > narrow.std()


def test_the_label_changes_half_way(make):
    sampler = make()
    later = torch.tensor([2, 2, 2])
    same, changed = (sampler.change_of_label(LABELS, other, IMAGES) for other in (LABELS, later))
    torch.testing.assert_close(same, sampler.draw(LABELS, IMAGES), rtol=0, atol=1e-5)
    torch.testing.assert_close(changed[:, :, :2], same[:, :, :2], rtol=0, atol=1e-5)
    assert not torch.equal(changed[:2, :, 2:], same[:2, :, 2:])


def test_masked_rounds_end_with_the_sample(make):
    sampler = make("objective.name=givt_maskgit", schedule=MaskGITSchedule(num_steps=5))
    rounds = sampler.rounds(LABELS, IMAGES)
    assert len(rounds) == 5
    torch.testing.assert_close(rounds[-1], sampler.draw(LABELS, IMAGES))
    assert sampler.prior(IMAGES).shape == (3, 2, 4, 4)


@pytest.mark.parametrize(
    ("words", "choice", "message"),
    [
        (["objective.label_dropout=0.0"], {"guidance": 0.4}, "label_dropout"),
        (["objective.num_classes=0"], {"guidance": 0.4}, "label_dropout"),
        (["objective.name=givt_maskgit"], {"num_beams": 2}, "causal model"),
        ([], {"num_beams": 2, "guidance": 0.1}, "use no --beams"),
        ([], {"scale": -1.0}, "0 or more"),
    ],
)
def test_what_cannot_be_is_refused(make, words, choice, message):
    with pytest.raises(UserError, match=message):
        make(*words, choice=TokenChoice(**choice))
