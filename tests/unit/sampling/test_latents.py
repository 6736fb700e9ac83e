"""GIVT's samplers on small random models, against plain ways of doing the same."""

import pytest
import torch

from megavis.config.errors import UserError
from megavis.config.load import load_config
from megavis.model.runner import Runner
from megavis.model.stack import LocalLayers, Stack
from megavis.objectives import OBJECTIVES, objective_configs
from megavis.sampling.continuous import generate_tokens
from megavis.sampling.densities import TokenChoice
from megavis.sampling.guidance import Acceptance
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
