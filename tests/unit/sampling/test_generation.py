"""Generation with a key-value cache against full forward passes."""

import numpy as np
import pytest
import torch

from megavis.config.errors import UserError
from megavis.parallel.random import uniform
from megavis.sampling.sampler import Sampler
from megavis.schedules.orders import to_raster

SHAPES = [
    # config overrides, number of given pixels
    ([], 0),
    ([], 1),
    (["data.image_size=3", "model.num_layers=3", "objective.order=random"], 4),
    (["data.image_size=2", "model.num_attention_heads=4", "model.normalization=layer_norm"], 3),
    (["data.image_size=5", "model.num_attention_heads=1", "model.add_bias=true"], 12),
    (["data.image_size=3"], 9),
]


@pytest.fixture
def sampler(build, tmp_path):
    """Build a sampler of an iGPT."""

    def sampler(*words, seed=0, **options):
        objective, inference = build(tmp_path / "c.yaml", *words)
        return Sampler(inference, objective, tmp_path, options, seed=seed)

    return sampler


def generate_without_cache(inference, objective, prefix, choose):
    """Run a full pass for each position, with zeros after it."""
    ids = torch.zeros(len(prefix), objective.num_tokens, dtype=torch.int64)
    ids[:, : prefix.shape[1]] = prefix
    for place in range(prefix.shape[1], objective.num_tokens):
        order = objective.schedule.for_features(torch.zeros(1).long()).order
        inputs = objective.inputs_from(to_raster(ids, order))
        logits = objective.outputs(inference.predictions(inputs))[:, place]
        ids[:, place] = torch.tensor(
            [choose(row, image, place) for image, row in enumerate(logits.tolist())]
        )
    return ids


def random_prefix(objective, num_given, batch_size=3):
    torch.manual_seed(4)
    return torch.randint(objective.density.num_outputs, (batch_size, num_given))


@pytest.mark.parametrize(("words", "num_given"), SHAPES)
def test_greedy_generation_matches_full_passes(sampler, words, num_given):
    greedy = sampler(*words, temperature=0.0)
    prefix = random_prefix(greedy.model, num_given)

    got = greedy.tokens(torch.arange(3), given=prefix)

    expected = generate_without_cache(
        greedy.inference, greedy.model, prefix, lambda row, *_: row.index(max(row))
    )
    assert torch.equal(got, expected)


@pytest.mark.parametrize(("words", "num_given"), SHAPES)
def test_sampling_matches_full_passes(sampler, words, num_given):
    warm = sampler(*words, temperature=0.8, seed=5)
    objective = warm.model
    prefix = random_prefix(objective, num_given)
    draws = uniform(torch.arange(7, 10), objective.num_tokens, seed=5, purpose="token")

    def choose(row, image, place):
        weights = np.exp((np.array(row) - max(row)) / 0.8)
        return int(
            np.searchsorted(np.cumsum(weights), draws[image, place] * weights.sum(), "right")
        )

    got = warm.tokens(torch.arange(7, 10), given=prefix)

    assert torch.equal(got, generate_without_cache(warm.inference, objective, prefix, choose))


def test_beam_search_finds_likelier_images(sampler):
    def log_likelihood(ids, each):
        inputs = each.model.inputs_from(ids)
        nats = each.model.density.per_token_loss(each.inference.predictions(inputs), ids)
        return -nats.sum(1)

    plain, search = sampler("data.image_size=3"), sampler("data.image_size=3", beams=4, fans=4)
    found, drawn = (log_likelihood(each.tokens(torch.arange(6)), each) for each in (search, plain))
    assert bool((found > drawn).all())


@pytest.mark.parametrize(("beams", "fans"), [(2, 3), (3, 1)])
def test_beam_search_matches_full_passes(sampler, beams, fans):
    search, images = sampler("data.image_size=3", beams=beams, fans=fans, seed=5), [7, 8]
    model = search.model
    for image, found in zip(images, search.tokens(torch.tensor(images)).tolist(), strict=True):
        kept = [([], 0.0)] * beams
        for place in range(9):
            each = fans if place else 1
            keys = image * beams * each + torch.arange(beams * each)
            draws = uniform(keys, 9, seed=5, purpose="token")[:, place].tolist()
            ids = torch.tensor([known + [0] * (9 - place) for known, _ in kept])
            logits = model.outputs(search.inference.predictions(model.inputs_from(ids)))
            nats, candidates = logits[:, place].double().log_softmax(-1), []
            for number, draw in enumerate(draws):
                (known, score), row = kept[number // each], nats[number // each]
                token = int((row.exp().cumsum(0) <= draw).sum())
                candidates.append(([*known, token], score + float(row[token])))
            kept = sorted(candidates, key=lambda pair: -pair[1])[:beams]
        assert found == kept[0][0]


@pytest.mark.parametrize("num_given", [0, 5])
def test_first_beams_differ(sampler, monkeypatch, num_given):
    """Beams are equal before the first step: the candidates of one must not fill them all."""
    drawing, shapes = sampler("data.image_size=3", beams=2, fans=3), []
    call = type(drawing.settings.token_sampler).__call__

    def counted(self, head, state, draws):
        shapes.append(len(draws.keys))
        return call(self, head, state, draws)

    monkeypatch.setattr(type(drawing.settings.token_sampler), "__call__", counted)
    drawing.tokens(torch.arange(4), given=random_prefix(drawing.model, num_given, 4))
    assert shapes == [8, *[24] * (8 - num_given)]


def test_samples_are_independent_of_batch_size(sampler):
    drawing = sampler("objective.order=random", seed=1)
    originals = torch.randint(32, (7, 16))
    given = {"originals": originals, "num_given": 5}

    at_once = drawing.sample(7, batch_size=7, **given)

    assert torch.equal(drawing.sample(7, batch_size=3, **given), at_once)
    kept = drawing.given_part(7, 5)
    assert (kept.sum(1) == 5).all()
    assert torch.equal(at_once[kept], originals[kept])
    assert not torch.equal(at_once, originals)
    # A second completion of the same originals uses different draws.
    twice = drawing.sample(14, **given)
    assert torch.equal(twice[:7], at_once)
    assert not torch.equal(twice[7:], at_once)
    assert torch.equal(twice[7:][kept], originals[kept])


def test_samples_differ_by_seed_and_image(sampler):
    first, second = (sampler(seed=seed).sample(4) for seed in (0, 1))
    assert len({tuple(row) for row in torch.cat([first, second]).tolist()}) == 8


def test_sampling_bert_raises(sampler):
    with pytest.raises(UserError, match="no order of generation; to generate, set objective.mode"):
        sampler("objective.mode=bert")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_images": 0}, "at least 1"),
        ({"num_images": 1, "num_given": 3}, "need the images"),
        ({"num_images": 2, "originals": torch.zeros(2, 15).long(), "num_given": 1}, "have shape"),
        ({"num_images": 1, "num_given": 17}, "must be in"),
        ({"num_images": 1, "conditions": {"labels": torch.zeros(1)}}, "not conditioned on labels"),
    ],
)
def test_invalid_arguments_raise(sampler, arguments, message):
    with pytest.raises(UserError, match=message):
        sampler().sample(**arguments)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"probability": 0.4},
            "probability does not apply to this run of igpt, which takes temperature, top_k",
        ),
        ({"sampling_steps": 3}, "sampling_steps does not apply"),
        ({"rounds": 3}, "rounds does not apply"),
        ({"beams": 0}, "at least 1"),
    ],
)
def test_inapplicable_options_raise(sampler, options, message):
    with pytest.raises(UserError, match=message):
        sampler(**options)


def test_guidance_needs_classes(sampler):
    with pytest.raises(UserError, match="guidance needs a model conditioned on classes"):
        sampler(guidance=0.4).sample(num_images=1)
