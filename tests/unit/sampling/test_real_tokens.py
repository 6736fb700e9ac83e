"""GIVT's samplers on small random models: cache, guidance, beams, completion and MaskGIT."""

from collections import Counter

import numpy as np
import pytest
import torch
from tiny import tiny

from megavis.config.errors import UserError
from megavis.config.load import load_config
from megavis.data.loading.loader import Batch
from megavis.model.encoder import EncoderInput
from megavis.model.inference import Inference
from megavis.model.stack import LayerStack, LocalLayers
from megavis.model.visibility import KeyValueCache
from megavis.papers import OBJECTIVES
from megavis.sampling.pictures import picture
from megavis.sampling.sampler import Sampler

CONFIG = tiny(
    "{name: givt, latent_channels: 2, downsampling: 8, num_classes: 3, num_components: 2}",
    model={"normalization": "layer_norm"},
    data={"image_size": 32},
)
ENCODER = (
    "objective.name=givt_encoder_decoder",
    "objective.num_classes=0",
    "objective.encoder_layers=1",
    "objective.encoder_patch_size=8",
)
LABELS, IMAGES = torch.tensor([0, 1, 2]), torch.tensor([5, 6, 7])


@pytest.fixture
def make(context, tmp_path):
    """Build a sampler of a small random model."""

    def make(*words, seed=0, **options):
        path = tmp_path / "tiny.yaml"
        path.write_text(CONFIG)
        config = load_config(path, words).config
        objective = OBJECTIVES[config.objective.name](config, context)
        plans = objective.layer_plans()
        layers = LocalLayers(plans, list(LayerStack(plans, objective.loss).layers))
        torch.manual_seed(0)
        for _, parameter in layers.named_parameters():
            torch.nn.init.normal_(parameter, std=0.2)
        return Sampler(Inference(layers, context), objective, tmp_path, options, seed=seed)

    return make


def latents(sampler, images, **options):
    """Sample latents in raster order."""
    images = torch.as_tensor(images)
    return sampler.from_order(sampler.tokens(images, **options), sampler.order_of(images))


@pytest.mark.parametrize("options", [{"temperature": 0.9, "probability": 2.0}, {"guidance": 0.4}])
def test_cache_does_not_change_samples(make, options):
    sampler = make("objective.adapter_blocks=1", seed=3, **options)
    drawn = [
        sampler.tokens(IMAGES, conditions={"labels": LABELS}, cached=cached)
        for cached in (True, False)
    ]
    torch.testing.assert_close(drawn[0], drawn[1], rtol=0, atol=1e-5)


@pytest.mark.parametrize("options", [{}, {"beams": 2, "fans": 2}])
def test_condition_image_is_encoded_once_per_sample(make, options, monkeypatch):
    sampler = make(*ENCODER, "objective.adapter_blocks=1", seed=3, **options)
    seen = torch.rand(3, 32, 32, 3, generator=torch.Generator().manual_seed(0)) * 2 - 1
    counts = Counter()
    _count_calls(monkeypatch, EncoderInput, "forward", counts)
    _count_calls(monkeypatch, KeyValueCache, "fixed", counts)
    drawn = sampler.tokens(IMAGES, conditions={"image": seen})
    # Two blocks and sixteen tokens.
    assert counts == {"forward": 1, "fixed": 2 * 16}
    whole = sampler.tokens(IMAGES, conditions={"image": seen}, cached=False)
    torch.testing.assert_close(drawn, whole, rtol=0, atol=1e-5)
    other = sampler.tokens(IMAGES, conditions={"image": seen.flip(0)})
    # Flipping the batch leaves only the middle image's condition unchanged.
    torch.testing.assert_close(other[1], drawn[1], rtol=0, atol=1e-5)
    assert not torch.isclose(other[0], drawn[0], rtol=0, atol=1e-2).all()


def test_picture_shows_image_target_and_predictions(make, monkeypatch):
    sampler = make(*ENCODER, "objective.tokenizer=none", seed=1)
    colours = torch.arange(12, dtype=torch.uint8).view(2, 2, 1, 1, 3) * 20
    examples = Batch(colours.expand(2, 2, 32, 32, 3), torch.tensor([-1, -1]), torch.arange(2))
    asked = []

    def decode(latents, folder=None):
        asked.append(latents)
        return torch.full((len(latents), 32, 32, 3), 7, dtype=torch.uint8)

    monkeypatch.setattr(sampler.model.reads, "to_images", decode)
    # Deciding whether these are label maps would need the missing tokenizer.
    monkeypatch.setattr(sampler.model.reads, "shown", lambda images: images)
    grid = picture([sampler], examples, num_images=2, num_copies=2, batch_size=3)
    # 32² images enlarged four times, separated by two pixels.
    assert grid.shape == (2 * 130 + 2, 4 * 130 + 2, 3)
    corners = grid[4::130, 4::130][:2, :4]
    assert np.array_equal(corners[:, :2], colours.flatten(2).numpy())
    assert (corners[:, 2:] == 7).all()
    alone = latents(sampler, [3], conditions={"image": examples.inputs[1:, 0]})
    torch.testing.assert_close(torch.cat(asked)[3:], alone, rtol=0, atol=1e-5)


def test_encoder_decoder_requires_images(make):
    sampler = make(*ENCODER)
    with pytest.raises(UserError, match="give those for its encoder"):
        sampler.tokens(IMAGES)
    with pytest.raises(UserError, match="cannot generate images without one"):
        sampler.balanced_images(IMAGES)


def _count_calls(monkeypatch, kind, name, counts):
    function = getattr(kind, name)

    def counted(*arguments):
        counts[name] += 1
        return function(*arguments)

    monkeypatch.setattr(kind, name, counted)


@pytest.mark.parametrize("name", ["givt", "givt_maskgit"])
def test_samples_are_independent_of_the_batch(make, name):
    sampler = make(f"objective.name={name}", guidance=0.3, seed=1)
    together = latents(sampler, IMAGES, conditions={"labels": LABELS})
    apart = torch.cat(
        [
            latents(sampler, IMAGES[i : i + 1], conditions={"labels": LABELS[i : i + 1]})
            for i in range(3)
        ]
    )
    assert together.shape == (3, 2, 4, 4)
    torch.testing.assert_close(together, apart, rtol=0, atol=1e-5)
    assert sampler.acceptance.share_found > 0.99


def test_beam_search_finds_likelier_tokens(make):
    def log_likelihood(sampler):
        tokens = sampler.tokens(IMAGES, conditions={"labels": LABELS})
        model = sampler.model
        predictions = sampler.inference.predictions(model.inputs_from(tokens, labels=LABELS))
        return -model.density.per_token_loss(predictions, tokens).sum(1)

    found, plain = log_likelihood(make(beams=3, fans=4)), log_likelihood(make())
    assert bool((found > plain).all())


def test_beam_search_with_one_fan_gives_finite_tokens(make):
    assert torch.isfinite(make(beams=4, fans=1).tokens(IMAGES)).all()


def test_lower_temperature_reduces_variance(make):
    wide, narrow, again = (make(temperature=t).tokens(IMAGES) for t in (1.0, 0.0, 0.0))
    assert torch.equal(narrow, again)
    assert wide.std() > narrow.std()


def test_later_label_applies_to_the_second_half(make):
    sampler = make()
    labels, later = {"labels": LABELS}, {"labels": torch.tensor([2, 2, 2])}
    same, changed = (sampler.sample(3, conditions=labels, later=each) for each in (labels, later))
    plain = sampler.sample(3, conditions=labels)
    torch.testing.assert_close(same, plain, rtol=0, atol=1e-5)
    torch.testing.assert_close(changed[:, :, :2], same[:, :, :2], rtol=0, atol=1e-5)
    assert not torch.equal(changed[:2, :, 2:], same[:2, :, 2:])


def test_images_may_share_their_first_half(make):
    """Figure 19: the same latents above, whatever class comes below."""
    labels, later = {"labels": torch.tensor([1, 1, 1])}, {"labels": torch.tensor([1, 2, 0])}
    drawn = make().sample(3, conditions=labels, later=later, first_halves=torch.tensor([0, 0, 0]))
    plain = make().sample(3, conditions=labels)
    torch.testing.assert_close(drawn[0], plain[0], rtol=0, atol=1e-5)
    for image in drawn[1:]:
        torch.testing.assert_close(image[:, :2], plain[0, :, :2], rtol=0, atol=1e-5)
    assert len(torch.unique(drawn[:, :, 2:].flatten(1), dim=0)) == 3


def test_completion_keeps_the_given_latents(make):
    """Without an adapter, tokens are latents, so the given upper half is unchanged."""
    originals = torch.randn(3, 2, 4, 4, generator=torch.Generator().manual_seed(0))
    completed = make().sample(3, originals=originals, num_given=8)
    assert torch.equal(completed[:, :, :2], originals[:, :, :2])
    assert not torch.equal(completed[:, :, 2:], originals[:, :, 2:])


def test_last_maskgit_round_is_the_sample(make):
    sampler = make("objective.name=givt_maskgit", rounds=5)
    rounds = [tokens.clone() for tokens in sampler.rounds(IMAGES, conditions={"labels": LABELS})]
    assert len(rounds) == 5
    drawn = sampler.tokens(IMAGES, conditions={"labels": LABELS})
    torch.testing.assert_close(rounds[-1], drawn)
    assert not torch.equal(rounds[0], drawn)
    assert sampler.model.reads.prior(IMAGES, seed=0).shape == (3, 2, 4, 4)


def test_each_token_of_a_round_has_its_own_draws(make, monkeypatch):
    sampler, keys = make("objective.name=givt_maskgit", rounds=3), []
    kind = type(sampler.settings.token_sampler)
    call = kind.__call__

    def remembered(self, head, state, draws):
        keys.append(draws.keys)
        return call(self, head, state, draws)

    monkeypatch.setattr(kind, "__call__", remembered)
    sampler.tokens(IMAGES, conditions={"labels": LABELS})
    assert len(keys) == 3
    assert all(len(each.unique()) == each.numel() == 3 * 16 for each in keys)


@pytest.mark.parametrize(
    ("words", "options", "message"),
    [
        (["objective.name=givt_maskgit"], {"beams": 2}, "beams does not apply"),
        (
            ["objective.covariance=full", "objective.num_components=1"],
            {"guidance": 0.4},
            "guidance does not apply",
        ),
        ([], {"beams": 2, "guidance": 0.1}, "leave out beams"),
        ([], {"temperature": -1.0}, "0 or more"),
        ([], {"top_k": 4}, "top_k does not apply"),
    ],
)
def test_inapplicable_options_raise(make, words, options, message):
    with pytest.raises(UserError, match=message):
        make(*words, **options)


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("objective.label_dropout=0.0", "objective.label_dropout"),
        (
            "objective.num_classes=0",
            "needs a model conditioned on classes.* this one has no classes",
        ),
    ],
)
def test_guidance_requires_label_dropout(make, word, message):
    with pytest.raises(UserError, match=message):
        make(word, guidance=0.4).balanced_images(IMAGES)


def test_unsupported_completion_raises(make):
    latents = torch.zeros(1, 2, 4, 4)
    with pytest.raises(UserError, match="begin with all tokens hidden: none can be given"):
        make("objective.name=givt_maskgit").sample(1, originals=latents, num_given=4)
    with pytest.raises(UserError, match="adapter_blocks every token depends on the whole image"):
        make("objective.adapter_blocks=1").sample(1, originals=latents, num_given=4)


def test_pairs_of_latents_are_shown_as_given(make, monkeypatch):
    """A token of two latents covers 8 × 16 pixels of an image of 32²."""
    drawing = make("objective.stacked_latents=2", "objective.num_classes=0")
    monkeypatch.setattr(
        drawing.model, "to_images", lambda latents, _: torch.zeros(len(latents), 32, 32, 3).byte()
    )
    shards = torch.rand(2, 2, 2, 4, 4)
    drawn = picture([drawing], Batch(shards, LABELS[:2], IMAGES[:2]), num_images=2, share=3 / 8)
    given = drawn[2:130, 132:260] == 0
    assert given[:32].all()
    assert given[32:64, :64].all()
    assert not given[32:64, 64:].any()
    assert not given[64:].any()
