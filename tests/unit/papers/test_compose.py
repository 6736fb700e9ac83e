"""Compositions from YAML: what they refuse, the papers that they contain, what sees what."""

import pytest
import torch
import torch.nn.functional as F
from small_batches import batch_of, photographs, run_layers
from small_vqgan import write_untrained_run
from tiny import VIT, tiny

from megavis.config.errors import UserError
from megavis.data.format.manifest import Manifest
from megavis.model.encoder import EncoderInput
from megavis.sampling.sampler import Sampler


def config(objective):
    return tiny(objective, model={**VIT, "norm_epsilon": 1e-5})


PALETTE = "reads: {kind: palette, vocabulary_size: 32}"
PATCHES = "reads: {kind: patches, patch_size: 4}"
IDS = "{kind: ids, vocabulary_size: 12, patch_size: 4, tokenizer: run}"
LATENTS = "reads: {kind: latents, channels: 4, patch_size: 4}"
ONE_BY_ONE = "schedule: {kind: one_by_one}"
RANDOM = "schedule: {kind: one_by_one, order: random}"
GROUPS = "schedule: {kind: groups, num_groups: 3}"
SHIFT, CONTENT, BOTH, MASK, QUERY = (
    f"asks: {{kind: {words}}}"
    for words in ("shift", "shift, place: content", "shift, place: both", "mask", "query")
)
CATEGORICAL, ERROR, MIXTURE = (
    f"density: {{kind: {words}}}"
    for words in ("categorical", "squared_error", "mixture, num_components: 3")
)
DIFFUSION = "density: {kind: diffusion, noise_a: 1, sampling_steps: 4}"
FRAMES, SPEECH = "reads: {kind: frames}", ("data={train: shards, frames: [12, 5]}",)
CONTEXT = "schedule: {kind: context, mask_ratio: 0.5}"
PLACE = "density: {kind: place}"
ITSELF = "asks: {kind: self}"
BRIDGE = "asks: {kind: bridge, decoder: {num_layers: 2, hidden_size: 8, num_attention_heads: 2}}"
CLASSES = "condition: {kind: class, num_classes: 3}"
FEATURES = "condition: {kind: features, feature_size: 4, tokenizer: VQGAN}"
ADAPTER = "transform: {kind: adapter, blocks: 2}"
MEMORY = "condition: {kind: memory, num_layers: 2, patch_size: 8}"


@pytest.fixture
def build(build_paper):
    """Build a composition of these words."""

    def build(*words, more=()):
        objective = f"{{name: compose, {', '.join(words)}}}"
        return build_paper(config(objective), *more, std=0.3)

    return build


# What makes no sense.


@pytest.mark.parametrize(
    ("words", "more", "key", "said"),
    [
        ([PATCHES, ONE_BY_ONE, MASK, ERROR], [], "asks.kind", "mask needs schedule masked or"),
        ([PATCHES, GROUPS, SHIFT, ERROR], [], "asks.kind", "shift needs schedule one_by_one"),
        (
            [PATCHES, RANDOM, SHIFT, ERROR],
            [],
            "asks.place",
            "asked does not encode the position of the held",
        ),
        (
            [PATCHES, RANDOM, CONTENT, ERROR],
            [],
            "asks.place",
            "content does not encode the position of the next",
        ),
        ([PALETTE, ONE_BY_ONE, SHIFT, ERROR], [], "density.kind", "squared_error cannot predict"),
        ([PATCHES, ONE_BY_ONE, SHIFT, CATEGORICAL], [], "density.kind", "cannot predict patches"),
        (
            [PATCHES, f"predicts: {IDS.replace('4', '8')}", ONE_BY_ONE, SHIFT, CATEGORICAL],
            [],
            "predicts",
            "has 2 × 2 tokens per image, but objective.reads has 4 × 4",
        ),
        (
            [PATCHES, f"predicts: {IDS.replace(', tokenizer: run', '')}", ONE_BY_ONE]
            + [SHIFT, CATEGORICAL],
            [],
            "predicts.tokenizer",
            "must name the run folder",
        ),
        (
            [PALETTE, f"predicts: {IDS.replace('4', '1')}", ONE_BY_ONE, SHIFT, CATEGORICAL],
            [],
            "reads.kind",
            "palette shards contain no images",
        ),
        (
            [PATCHES, "schedule: {kind: one_by_one, prefix: 4}", SHIFT, ERROR],
            [],
            "schedule.prefix",
            "needs asks of kind shift with place content",
        ),
        (
            [PATCHES, "schedule: {kind: one_by_one, prefix: 16}", CONTENT, ERROR],
            [],
            "schedule.prefix",
            "16 leaves nothing to predict of 16 tokens",
        ),
        (
            [PATCHES, "schedule: {kind: one_by_one, order: round_robin, order_block: 3}"]
            + [SHIFT, ERROR],
            [],
            "schedule.order_block",
            "3 does not divide a grid of 4 × 4",
        ),
        (
            [PATCHES, "schedule: {kind: groups, num_groups: 16}", QUERY, ERROR],
            [],
            "schedule.num_groups",
            "16 groups cannot be cut from 16 tokens; use at most 15",
        ),
        (
            [PATCHES, "schedule: {kind: rounds}", MASK, ERROR, CLASSES],
            [],
            "condition.kind",
            "asks is mask",
        ),
        ([PATCHES, ONE_BY_ONE, ITSELF, PLACE], [], "asks.kind", "self needs schedule context"),
        (
            [PATCHES, CONTEXT, ITSELF, ERROR],
            [],
            "density.kind",
            "cannot be combined with asks self",
        ),
        (
            [PATCHES, ONE_BY_ONE, SHIFT, PLACE],
            [],
            "density.kind",
            "cannot be combined with asks shift",
        ),
        (
            [PALETTE, CONTEXT, ITSELF, PLACE],
            [],
            "reads.kind",
            "positions of palette cannot be predicted",
        ),
        (
            [PATCHES, f"predicts: {IDS}", CONTEXT, ITSELF, PLACE],
            [],
            "predicts.kind",
            "is not used with density place",
        ),
        (
            [PATCHES, CONTEXT, "asks: {kind: self, given_ratio: 0.5}", PLACE],
            ["model.positions=sincos"],
            "asks.given_ratio",
            "leaves no context token without its position; lower it, or objective.schedule.mask",
        ),
        (
            [PATCHES, CONTEXT, ITSELF, PLACE],
            ["model.positions=learned"],
            "",
            "learned reveals what the model has to predict",
        ),
        ([PATCHES, CONTEXT, ITSELF, PLACE, CLASSES], [], "condition.kind", "asks is self"),
        (
            [PATCHES, CONTEXT, BRIDGE, DIFFUSION],
            [],
            "density.kind",
            "is not supported with a bridge",
        ),
        ([PATCHES, ONE_BY_ONE, BRIDGE, ERROR], [], "asks.kind", "bridge needs schedule contex"),
        (
            [PATCHES, CONTEXT.replace("0.5", "0.01"), BRIDGE, ERROR],
            [],
            "schedule.mask_ratio",
            "0.01 of 16 patches hides none",
        ),
        (
            [PATCHES, CONTEXT, BRIDGE.replace("8", "6"), ERROR],
            [],
            "asks.decoder.hidden_size",
            "6 is not divisible by 4",
        ),
        ([PATCHES, CONTEXT, BRIDGE, ERROR], ["model.positions=rope_2d"], "", "not reach the decod"),
        ([FRAMES, CONTEXT, ITSELF, PLACE], [], "reads.kind", "set both frames and data.frames"),
        (
            [PATCHES, CONTEXT, ITSELF, PLACE],
            SPEECH,
            "reads.kind",
            "set both frames and data.frames",
        ),
        (
            [FRAMES, "schedule: {kind: one_by_one, order: nested_raster}", SHIFT, ERROR],
            SPEECH,
            "schedule.order",
            "nested_raster needs a square grid",
        ),
        (
            [FRAMES, f"predicts: {IDS}", ONE_BY_ONE, SHIFT, CATEGORICAL],
            SPEECH,
            "predicts.kind",
            "frames can be predicted only from frames",
        ),
        (
            [PATCHES, ONE_BY_ONE, SHIFT, ERROR, FEATURES],
            [],
            "condition.kind",
            "of kind query, not shift",
        ),
        ([LATENTS, ONE_BY_ONE, QUERY, ERROR, FEATURES], [], "reads.kind", "latents shards lack"),
        (
            [PATCHES, GROUPS, QUERY, ERROR, FEATURES],
            ["parallel.tensor_model_parallel_size=2", "parallel.sequence_parallel=true"],
            "",
            "33 rows are not divisible by tensor_model_parallel_size 2",
        ),
        ([PATCHES, ONE_BY_ONE, SHIFT, MIXTURE, ADAPTER], [], "transform.kind", "needs latents"),
        ([LATENTS, ONE_BY_ONE, SHIFT, ERROR, ADAPTER], [], "transform.kind", "and density mixture"),
        ([LATENTS, RANDOM, BOTH, MIXTURE, ADAPTER], [], "transform.kind", "in raster order"),
        (
            [LATENTS.replace("channels: 4", "channels: 3"), ONE_BY_ONE, SHIFT, MIXTURE, ADAPTER],
            [],
            "transform.blocks",
            "3 channels are odd",
        ),
        (
            [LATENTS, ONE_BY_ONE, SHIFT, MIXTURE, ADAPTER.replace("2}", "2, bottleneck: 2}")],
            [],
            "transform.bottleneck",
            "must be divisible by 2",
        ),
        (
            [PALETTE, ONE_BY_ONE, SHIFT, CATEGORICAL, MEMORY],
            [],
            "reads.kind",
            "palette shards lack",
        ),
        ([FRAMES, ONE_BY_ONE, SHIFT, ERROR, MEMORY], SPEECH, "reads.kind", "frames shards lack"),
        (
            [PATCHES, ONE_BY_ONE, SHIFT, ERROR, MEMORY.replace("8", "5")],
            [],
            "condition.patch_size",
            "5 does not divide data.image_size 16",
        ),
        (
            [PATCHES, ONE_BY_ONE, SHIFT, ERROR, MEMORY.replace("}", ", hidden_size: 31}")],
            [],
            "condition.num_attention_heads",
            "width 31 does not divide by 2 heads",
        ),
        (
            [PATCHES, ONE_BY_ONE, SHIFT, ERROR, MEMORY.replace("8", "16")],
            [
                "parallel.tensor_model_parallel_size=2",
                "parallel.sequence_parallel=true",
            ],
            "",
            "1 patches of the encoder are not divisible",
        ),
        ([PATCHES, CONTEXT, BRIDGE, ERROR, MEMORY], [], "condition.kind", "above a bridge"),
        ([PATCHES, CONTEXT, ITSELF, PLACE, MEMORY], [], "condition.kind", "asks is self"),
        ([PATCHES.replace("4", "5"), ONE_BY_ONE, SHIFT, ERROR], [], "reads.patch_size", "5 does"),
        (
            [PATCHES, GROUPS, QUERY, ERROR],
            ["model.positions=none"],
            "",
            "none makes all tokens that query asks for",
        ),
        ([PATCHES, RANDOM, BOTH, ERROR], ["model.positions=rope_2d"], "", "cannot add two places"),
        (
            [PALETTE.replace("32", "33"), ONE_BY_ONE, SHIFT, CATEGORICAL],
            ["parallel.tensor_model_parallel_size=2"],
            "reads.vocabulary_size",
            "33 is not divisible by tensor_model_parallel_size 2",
        ),
        ([PATCHES, ONE_BY_ONE, SHIFT, "density: {kind: mixtur}"], [], "density.kind", "mixture'"),
        ([PATCHES, ONE_BY_ONE, SHIFT, "density: {}"], [], "density.kind", "is missing"),
        (
            [PATCHES, ONE_BY_ONE, SHIFT, "density: {kind: mixture, componets: 3}"],
            [],
            "density.componets",
            "did you mean 'num_components'",
        ),
    ],
)
def test_what_makes_no_sense_is_refused_by_its_key(build, words, more, key, said):
    with pytest.raises(UserError, match=rf"{'objective.' if key else ''}{key}.*: ") as raised:
        build(*words, more=more)
    assert said in str(raised.value)
    assert "\n" not in str(raised.value)


# The papers that it contains.

IGPT = "{name: igpt, vocabulary_size: 32"
PAPERS = {
    "igpt": (IGPT + "}", [PALETTE, ONE_BY_ONE, SHIFT, CATEGORICAL], {"tokens": "content"}),
    "bert": (
        IGPT + ", mode: bert}",
        [PALETTE, "schedule: {kind: masked}", "asks: {kind: mask, filler: zeros}", CATEGORICAL],
        {"tokens": "content"},
    ),
    "darl": (
        "{name: darl, patch_size: 4}",
        [PATCHES, ONE_BY_ONE, CONTENT, ERROR],
        {"patches": "content", "head.decoder.linear": "head.linear"},
    ),
    "darl_random": (
        "{name: darl, patch_size: 4, order: random, two_streams: true}",
        [PATCHES, RANDOM, QUERY, ERROR],
        {"patches": "content", "head.decoder.linear": "head.linear"},
    ),
    "darl_diffusion": (
        "{name: darl, patch_size: 4, loss: diffusion, noise_a: 1}",
        [PATCHES, ONE_BY_ONE, CONTENT, DIFFUSION],
        {"patches": "content"},
    ),
    "givt": (
        "{name: givt, latent_channels: 4, downsampling: 4, num_classes: 3, num_components: 3}",
        [LATENTS, ONE_BY_ONE, SHIFT, MIXTURE, CLASSES],
        {"linear": "content"},
    ),
    "givt_adapter": (
        "{name: givt, latent_channels: 4, downsampling: 4, num_classes: 3, num_components: 3,"
        " adapter_blocks: 2}",
        [LATENTS, ONE_BY_ONE, SHIFT, MIXTURE, CLASSES, ADAPTER],
        {"linear": "content"},
    ),
    "givt_encoder_decoder": (
        "{name: givt_encoder_decoder, latent_channels: 4, downsampling: 4, num_components: 3,"
        " encoder_layers: 2, encoder_patch_size: 8, tokenizer: vae}",
        [LATENTS.replace("}", ", tokenizer: vae}"), ONE_BY_ONE, SHIFT, MIXTURE, MEMORY],
        {"linear": "content", "labels.weight": "start_token"},
    ),
    "gvp_features": (
        "{name: gvp, patch_size: 4, num_groups: 3, segmentation: mixed, condition_size: 4,"
        " tokenizer: VQGAN}",
        [PATCHES, "schedule: {kind: groups, length: mixed, num_groups: 3}", QUERY, ERROR, FEATURES],
        {"linear_content": "content", "linear_condition": "features"},
    ),
    "mp3": (
        "{name: mp3, patch_size: 4, mask_ratio: 0.5}",
        [PATCHES, CONTEXT, ITSELF, PLACE],
        {"patches": "content"},
    ),
    "mp3_speech": (
        "{name: mp3, mask_ratio: 0.5, given_ratio: 0.25, class_token: false}",
        [FRAMES, CONTEXT, "asks: {kind: self, given_ratio: 0.25, class_token: false}", PLACE],
        {"patches": "content"},
    ),
    "mae": (
        "{name: mae, patch_size: 4, mask_ratio: 0.5,"
        " decoder: {num_layers: 2, hidden_size: 8, num_attention_heads: 2}}",
        [PATCHES, CONTEXT, BRIDGE, "density: {kind: squared_error, normalize: true}"],
        {"patches": "content"},
    ),
}
OPTIONS = {
    "mp3_speech": ("model.positions=learned", *SPEECH),
    **dict.fromkeys(("mae", "gvp_features"), ("model.positions=learned",)),
    **dict.fromkeys(("darl", "darl_random", "darl_diffusion"), ("model.positions=rope_2d",)),
}
ALWAYS = {"positions": "places", "start": "start_token", "query": "query_vector"}


def samples_of(name):
    if name in ("igpt", "bert"):
        ids = torch.randint(32, (3, 256), generator=torch.Generator().manual_seed(0))
        return batch_of(ids)
    if name == "givt_encoder_decoder":
        return batch_of(photographs(6, 16).view(3, 2, 16, 16, 3))
    if name.startswith("givt"):
        moments = torch.rand(3, 2, 4, 4, 4, generator=torch.Generator().manual_seed(0))
        return batch_of(moments.half())
    if name == "mp3_speech":
        return batch_of(torch.rand(3, 12, 5, generator=torch.Generator().manual_seed(0)))
    return batch_of(photographs(3, 16))


class Means:
    """A VAE whose latents are the mean colours of patches of 4², without any spread."""

    def to(self, device):
        return self

    def encode(self, images):
        means = F.avg_pool2d(images.movedim(-1, 1).float() / 255, 4)
        means = torch.cat([means, means[:, :1]], 1)
        return torch.stack([means, torch.zeros_like(means)], 1)


@pytest.fixture(scope="module")
def vqgan(tmp_path_factory):
    return str(write_untrained_run(tmp_path_factory.mktemp("vqgan")))


@pytest.mark.parametrize("name", list(PAPERS))
def test_a_papers_words_are_that_paper(build_paper, build, name, vqgan):
    """The same weights under the composition's names give the same loss."""
    objective, words, renamed = PAPERS[name]
    objective = objective.replace("VQGAN", vqgan)
    words = [word.replace("VQGAN", vqgan) for word in words]
    more = OPTIONS.get(name, ())
    paper, paper_runner = build_paper(config(objective), *more, std=0.3)
    composed, runner = build(*words, more=more)
    weights = dict(paper_runner.layers.named_parameters())
    for key, value in list(weights.items()):
        layer, _, rest = key.partition(".")
        first, dot, last = rest.partition(".")
        found = {**ALWAYS, **renamed}
        new = f"{layer}.{found.get(rest) or found.get(first, first) + dot + last}"
        if layer != "embedding":
            new = key
            for old, other in renamed.items():
                new = new.replace(old, other) if "." in old else new
        weights[new] = weights.pop(key) if new != key else value
    own = dict(runner.layers.named_parameters())
    assert set(own) == set(weights)
    with torch.no_grad():
        for key, parameter in own.items():
            # The only label of all takes the place of a composition's start token.
            parameter.copy_(weights[key].view_as(parameter))
    losses = []
    for each, run in ((paper, paper_runner), (composed, runner)):
        each.reads.__dict__.update({"tokenizer": Means()} if "tokenizer: vae" in objective else {})
        sequence = each.sequence(samples_of(name))
        losses.append(each.loss(run.predictions(sequence.inputs), sequence.targets))
    assert torch.equal(losses[0], losses[1])


# What sees what.


def seen_by_each(objective, runner):
    """True where a change of the token at a position moves what is predicted at another."""
    images = photographs(2, 16)
    order = objective.schedule.draw(torch.arange(2)).order.expand(2, -1)
    before = objective.outputs(runner.predictions(objective.inputs_from(images)))
    moved = torch.zeros(2, 16, 16, dtype=torch.bool)
    for place in range(16):
        other = objective.reads.of(images)
        other[torch.arange(2), order[:, place]] += 1.0
        changed = objective.reads.to_images(other)
        after = objective.outputs(runner.predictions(objective.inputs_from(changed)))
        moved[:, :, place] = (after != before).any(-1)
    return moved


@pytest.mark.parametrize("asks", [BOTH, QUERY])
def test_in_random_order_a_token_is_predicted_from_those_before_it(build, asks):
    objective, runner = build(PATCHES, RANDOM, asks, MIXTURE)
    moved = seen_by_each(objective, runner)
    assert torch.equal(moved, torch.ones(16, 16, dtype=torch.bool).tril(-1).expand(2, -1, -1))


def test_a_prefix_sees_itself_and_is_not_scored(build):
    words = [PATCHES, "schedule: {kind: one_by_one, prefix: 5}", CONTENT, ERROR]
    objective, runner = build(*words)
    moved = seen_by_each(objective, runner)
    expected = torch.ones(16, 16, dtype=torch.bool).tril(-1)
    expected[1:6, :5] = True
    assert torch.equal(moved[:, 1:], expected[1:].expand(2, -1, -1))
    sequence = objective.sequence(batch_of(photographs(2, 16)))
    predictions = runner.predictions(sequence.inputs)
    errors = (predictions - sequence.targets[0]).square().mean(-1)[:, 5:]
    torch.testing.assert_close(objective.loss(predictions, sequence.targets), errors.mean())


# Generation.

DRAWABLE = {
    "random mixture": [PATCHES, RANDOM, BOTH, MIXTURE],
    "queries": [PATCHES, RANDOM, QUERY, MIXTURE],
    "diffusion on latents": [LATENTS, ONE_BY_ONE, CONTENT, DIFFUSION],
    "class and prefix": [
        *[PALETTE, "schedule: {kind: one_by_one, prefix: 8}", CONTENT, CATEGORICAL, CLASSES]
    ],
    "rounds": [PATCHES, "schedule: {kind: rounds}", MASK, MIXTURE],
    "adapter": [LATENTS, ONE_BY_ONE, SHIFT, MIXTURE, ADAPTER],
}


@pytest.mark.parametrize("name", list(DRAWABLE))
def test_tokens_are_drawn_from_those_that_are_known(build, tmp_path, name):
    """Each token drawn with a cache, or in groups, is the one that whole passes give."""
    objective, runner = build(*DRAWABLE[name])
    sampler = Sampler(runner, objective, tmp_path, seed=3)
    images = torch.arange(2)
    prefix = getattr(objective.schedule, "prefix", 0)
    order = sampler.order_of(images)
    blank = objective.blank_tokens(images)
    given = None
    if prefix:
        given = torch.randint(32, (2, prefix), generator=torch.Generator().manual_seed(0))
    tokens = sampler.tokens(images, order=order, given=given)
    assert tokens.shape == blank.shape
    whole = sampler.tokens(images, order=order, given=given, cached=False)
    torch.testing.assert_close(tokens, whole, rtol=1e-4, atol=1e-4)
    if prefix:
        assert torch.equal(tokens[:, :prefix], given)
        with pytest.raises(UserError, match="prefix of 8 tokens: give as many"):
            sampler.tokens(images, order=order)


@pytest.mark.parametrize(
    ("words", "memory"),
    [
        ([PATCHES, ONE_BY_ONE, SHIFT, MIXTURE], MEMORY),
        ([PATCHES, RANDOM, QUERY, MIXTURE], MEMORY.replace("}", ", hidden_size: 24}")),
        ([PATCHES, "schedule: {kind: rounds}", MASK, MIXTURE], MEMORY),
    ],
)
def test_an_image_is_encoded_once_and_decides_what_is_drawn(
    build, tmp_path, monkeypatch, words, memory
):
    objective, runner = build(*words, memory)
    sampler = Sampler(runner, objective, tmp_path, seed=3)
    forward, calls = EncoderInput.forward, []
    monkeypatch.setattr(EncoderInput, "forward", lambda *args: calls.append(1) or forward(*args))
    images, seen = torch.arange(3), photographs(3, 16)
    drawn = sampler.tokens(images, conditions={"image": seen})
    assert len(calls) == 1
    whole = sampler.tokens(images, conditions={"image": seen}, cached=False)
    torch.testing.assert_close(drawn, whole, rtol=1e-4, atol=1e-4)
    other = sampler.tokens(images, conditions={"image": seen.flip(0)})
    # The one in the middle sees the same image.
    torch.testing.assert_close(other[1], drawn[1], rtol=1e-4, atol=1e-4)
    assert not torch.isclose(other[0], drawn[0], rtol=0, atol=1e-2).all()


def test_classes_of_data_fit_the_table(build):
    objective, _ = build(PATCHES, ONE_BY_ONE, SHIFT, ERROR, CLASSES)
    for names, said in (
        ((), "has no labels, and objective.condition.num_classes is 3; give labelled"),
        (tuple("abcd"), "has 4 classes; objective.condition.num_classes is 3"),
        (tuple("abc"), ""),
    ):
        manifest = Manifest.model_construct(kind="jpeg", class_names=names)
        assert "".join(objective.check_data(manifest)).startswith(said)
        assert bool(said) == bool([*objective.check_data(manifest)])


@pytest.mark.parametrize(
    ("words", "more", "said"),
    [
        (
            [PATCHES, "schedule: {kind: masked}", MASK, ERROR],
            (),
            "masked has no order of generation",
        ),
        ([PATCHES, CONTEXT, ITSELF, PLACE], (), "context has no order of generation"),
        ([FRAMES, ONE_BY_ONE, SHIFT, ERROR], SPEECH, "frames of a spectrogram cannot be shown"),
        ([PATCHES, GROUPS, QUERY, ERROR, FEATURES], (), "is conditioned on the whole image"),
    ],
)
def test_what_cannot_be_drawn_says_so(build, words, more, said):
    objective, _ = build(*words, more=more)
    with pytest.raises(UserError, match=said):
        objective.generation()


def test_a_composition_of_places_has_their_accuracies_and_figures(build):
    objective, runner = build(PATCHES, CONTEXT, ITSELF, PLACE)
    sequence = objective.sequence(batch_of(photographs(3, 16)))
    predictions = runner.predictions(sequence.inputs)
    true = sequence.targets[0]
    hits = objective.outputs(predictions).argmax(-1) == true
    measures = objective.measures(predictions, sequence.targets)
    torch.testing.assert_close(measures["accuracy"], hits.float().mean())
    assert objective.places().num_places == 16
    other, _ = build(PATCHES, ONE_BY_ONE, SHIFT, ERROR)
    with pytest.raises(UserError, match="does not predict the positions"):
        other.places()


def test_features_of_classes_want_a_null_label(build):
    without = CLASSES.replace("3}", "3, dropout: 0}")
    objective, _ = build(PATCHES, ONE_BY_ONE, SHIFT, ERROR, without)
    with pytest.raises(UserError, match=r"objective\.condition\.dropout is 0"):
        objective.feature_inputs(batch_of(photographs(2, 16)))
    tuned = ("finetune={num_classes: 3}", "data.validation=held", "training.validate_every=1")
    with pytest.raises(UserError, match=r"objective\.condition\.dropout: is 0"):
        build(PATCHES, ONE_BY_ONE, SHIFT, ERROR, without, more=tuned)
    objective, runner = build(PATCHES, ONE_BY_ONE, SHIFT, ERROR, CLASSES)
    batch = batch_of(photographs(2, 16))
    assert runner.features(objective.feature_inputs(batch)).shape == (3, 2, 16)


def test_a_gradient_reaches_every_parameter(build):
    for words in DRAWABLE.values():
        objective, runner = build(*words)
        inputs = photographs(4, 16)
        if "latents" in words[0]:
            inputs = torch.rand(4, 2, 4, 4, 4)
        if "palette" in words[0]:
            inputs = torch.randint(32, (4, 256))
        batch = batch_of(inputs)
        sequence = objective.sequence(batch)
        predictions = run_layers(runner.layers.modules, sequence.inputs)
        objective.loss(predictions, sequence.targets).backward()
        missing = [
            name
            for name, parameter in runner.layers.named_parameters()
            if parameter.grad is None or not parameter.grad.abs().sum() > 0
        ]
        assert not missing, words
