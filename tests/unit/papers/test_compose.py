"""Compositions from YAML: visibility, generation and evaluation."""

import re
from pathlib import Path

import pytest
import torch
from compositions import (
    ADAPTER,
    BOTH,
    BRIDGE,
    CATEGORICAL,
    CLASSES,
    CONTENT,
    CONTEXT,
    DIFFUSION,
    ERROR,
    FEATURES,
    FRAMES,
    GROUPS,
    IDS,
    ITSELF,
    LATENTS,
    MASK,
    MEMORY,
    MIXTURE,
    ONE_BY_ONE,
    PALETTE,
    PATCHES,
    PLACE,
    QUERY,
    RANDOM,
    SHIFT,
    SPEECH,
)
from small_batches import batch_of, photographs, run_layers
from small_vqgan import write_untrained_run

from megavis.composition.model import generator_of
from megavis.config.errors import UserError
from megavis.data.format.manifest import Manifest
from megavis.model.encoder import EncoderInput
from megavis.model.layer_state import LayerState
from megavis.papers.mp3.place_figures import Places
from megavis.sampling.pictures import Gallery
from megavis.sampling.sampler import Sampler, settings_of
from megavis.schedules.one_by_one import OneByOne

ROUNDS = "schedule: {kind: rounds}"
NORMALIZED = "density: {kind: squared_error, normalize: true}"

# Visibility.


def dependencies(objective, inference):
    """Return `[b, n, n]`: whether the prediction at row i depends on the token at column j."""
    images = photographs(2, 16)
    order = objective.schedule.draw(torch.arange(2)).order.expand(2, -1)
    before = objective.outputs(inference.predictions(objective.inputs_from(images)))
    moved = torch.zeros(2, 16, 16, dtype=torch.bool)
    for place in range(16):
        other = objective.reads.of(images)
        other[torch.arange(2), order[:, place]] += 1.0
        changed = objective.reads.to_images(other)
        after = objective.outputs(inference.predictions(objective.inputs_from(changed)))
        moved[:, :, place] = (after != before).any(-1)
    return moved


@pytest.mark.parametrize("asks", [BOTH, QUERY])
def test_random_order_is_causal(build_composition, asks):
    objective, inference = build_composition(PATCHES, RANDOM, asks, MIXTURE)
    moved = dependencies(objective, inference)
    assert torch.equal(moved, torch.ones(16, 16, dtype=torch.bool).tril(-1).expand(2, -1, -1))


def test_prefix_is_bidirectional_and_not_scored(build_composition):
    words = [PATCHES, "schedule: {kind: one_by_one, prefix: 5}", CONTENT, ERROR]
    objective, inference = build_composition(*words)
    moved = dependencies(objective, inference)
    expected = torch.ones(16, 16, dtype=torch.bool).tril(-1)
    expected[1:6, :5] = True
    assert torch.equal(moved[:, 1:], expected[1:].expand(2, -1, -1))
    sequence = objective.sequence(batch_of(photographs(2, 16)))
    predictions = inference.predictions(sequence.inputs)
    errors = (predictions - sequence.targets[0]).square().mean(-1)[:, 5:]
    torch.testing.assert_close(objective.loss(predictions, sequence.targets), errors.mean())


OWN = "asks: {kind: shift, place: content, start: false}"


def test_drawn_prefix_is_bidirectional_and_not_scored(build_composition):
    words = [PATCHES, "schedule: {kind: one_by_one, prefix: drawn}", CONTENT, ERROR]
    objective, inference = build_composition(*words)
    lengths = (objective.schedule.draw(torch.arange(2)).groups == 0).sum(1).tolist()
    assert len(set(lengths)) == 2
    moved = dependencies(objective, inference)
    for found, length in zip(moved, lengths, strict=True):
        expected = torch.ones(16, 16, dtype=torch.bool).tril(-1)
        expected[1 : length + 1, :length] = True
        assert torch.equal(found[1:], expected[1:])
    sequence = objective.sequence(batch_of(photographs(2, 16)))
    predictions = inference.predictions(sequence.inputs)
    patches = objective.reads.of(photographs(2, 16))
    errors = [(predictions[i, n:] - patches[i, n:]).square().mean() for i, n in enumerate(lengths)]
    torch.testing.assert_close(objective.loss(predictions, sequence.targets), sum(errors) / 2)


@pytest.mark.parametrize("prefix", [1, 4, "drawn"])
def test_rows_without_a_start_token_predict_the_next_patch(build_composition, prefix):
    """Row t holds patch t, sees the prefix and the patches before it, and predicts patch t + 1."""
    words = [PATCHES, f"schedule: {{kind: one_by_one, prefix: {prefix}}}", OWN, ERROR]
    objective, inference = build_composition(*words)
    assert objective.asks.visibility == ("causal" if prefix == 1 else "two_stream")
    names = [name for name, _ in inference.layers.named_parameters()]
    assert "embedding.start" not in names
    lengths = (objective.schedule.draw(torch.arange(2)).groups == 0).sum(1).tolist()
    moved = dependencies(objective, inference)
    for found, length in zip(moved, lengths * 2, strict=False):
        expected = torch.ones(16, 16, dtype=torch.bool).tril()
        expected[:length, :length] = True
        assert torch.equal(found, expected)
    sequence = objective.sequence(batch_of(photographs(2, 16)))
    predictions = inference.predictions(sequence.inputs)
    patches = objective.reads.of(photographs(2, 16))
    errors = [
        (predictions[i, n - 1 : -1] - patches[i, n:]).square().mean()
        for i, n in enumerate(lengths * 2)
        if i < 2
    ]
    torch.testing.assert_close(objective.loss(predictions, sequence.targets), sum(errors) / 2)


def test_features_of_a_drawn_prefix_see_all_patches(build_composition):
    words = [PATCHES, "schedule: {kind: one_by_one, prefix: drawn}", OWN, ERROR]
    objective, inference = build_composition(*words)
    rows = objective.inputs_for_features(photographs(2, 16), None)
    hidden = inference.predictions(rows)
    assert hidden.shape[1] == 16
    full, everything = build_composition(*words), photographs(2, 16)
    tokens = objective.reads.of(everything)
    tokens[:, -1] += 1.0
    other = full[1].predictions(
        objective.inputs_from_tokens(tokens, objective.condition.for_features(tokens))
    )
    assert ((hidden - other).abs().amax(-1) > 0).all()


# Generation.

GENERATIVE = {
    "no start": [LATENTS, "schedule: {kind: one_by_one, prefix: 1}", OWN, DIFFUSION],
    "no start and prefix": [LATENTS, "schedule: {kind: one_by_one, prefix: 3}", OWN, DIFFUSION],
    "drawn prefix": [PATCHES, "schedule: {kind: one_by_one, prefix: drawn}", OWN, MIXTURE],
    "random mixture": [PATCHES, RANDOM, BOTH, MIXTURE],
    "queries": [PATCHES, RANDOM, QUERY, MIXTURE],
    "diffusion on latents": [LATENTS, ONE_BY_ONE, CONTENT, DIFFUSION],
    "class and prefix": [
        *[PALETTE, "schedule: {kind: one_by_one, prefix: 8}", CONTENT, CATEGORICAL, CLASSES]
    ],
    "rounds": [PATCHES, ROUNDS, MASK, MIXTURE],
    "adapter": [LATENTS, ONE_BY_ONE, SHIFT, MIXTURE, ADAPTER],
}


@pytest.mark.parametrize("name", list(GENERATIVE))
def test_cached_sampling_equals_full_passes(build_composition, tmp_path, name):
    """Sampling with a key-value cache, or in groups, gives the tokens of full forward passes."""
    objective, inference = build_composition(*GENERATIVE[name])
    sampler = Sampler(inference, objective, tmp_path, seed=3)
    images = torch.arange(2)
    schedule = objective.schedule
    prefix = schedule.prefix if isinstance(schedule, OneByOne) else 0
    order = sampler.order_of(images)
    blank = objective.reads.blank(images)
    given = None
    if prefix:
        generator = torch.Generator().manual_seed(0)
        given = torch.randn(2, prefix, *blank.shape[2:], generator=generator)
        if not blank.is_floating_point():
            given = torch.randint(32, (2, prefix), generator=generator)
    tokens = sampler.tokens(images, order=order, given=given)
    assert tokens.shape == blank.shape
    whole = sampler.tokens(images, order=order, given=given, cached=False)
    torch.testing.assert_close(tokens, whole, rtol=1e-4, atol=1e-4)
    if prefix:
        assert torch.equal(tokens[:, :prefix], given)
        few = f"prefix of {prefix} tokens: give as many|prefix: give at least one token"
        with pytest.raises(UserError, match=few):
            sampler.tokens(images, order=order)


@pytest.mark.parametrize(
    ("words", "memory"),
    [
        ([PATCHES, ONE_BY_ONE, SHIFT, MIXTURE], MEMORY),
        ([PATCHES, RANDOM, QUERY, MIXTURE], MEMORY.replace("}", ", hidden_size: 24}")),
        ([PATCHES, ROUNDS, MASK, MIXTURE], MEMORY),
    ],
)
def test_memory_condition_is_encoded_once(build_composition, tmp_path, monkeypatch, words, memory):
    objective, inference = build_composition(*words, memory)
    sampler = Sampler(inference, objective, tmp_path, seed=3)
    forward, calls = EncoderInput.forward, []
    monkeypatch.setattr(EncoderInput, "forward", lambda *args: calls.append(1) or forward(*args))
    images, seen = torch.arange(3), photographs(3, 16)
    drawn = sampler.tokens(images, conditions={"image": seen})
    assert len(calls) == 1
    whole = sampler.tokens(images, conditions={"image": seen}, cached=False)
    torch.testing.assert_close(drawn, whole, rtol=1e-4, atol=1e-4)
    other = sampler.tokens(images, conditions={"image": seen.flip(0)})
    # flip(0) leaves the middle image where it is.
    torch.testing.assert_close(other[1], drawn[1], rtol=1e-4, atol=1e-4)
    assert not torch.isclose(other[0], drawn[0], rtol=0, atol=1e-2).all()


def test_number_of_classes_is_checked(build_composition):
    objective, _ = build_composition(PATCHES, ONE_BY_ONE, SHIFT, ERROR, CLASSES)
    for names, message in (
        ((), "has no labels, and objective.condition.num_classes is 3; give labelled"),
        (tuple("abcd"), "has 4 classes; objective.condition.num_classes is 3"),
        (tuple("abc"), ""),
    ):
        manifest = Manifest.model_construct(kind="jpeg", class_names=names)
        assert "".join(objective.check_data(manifest)).startswith(message)
        assert bool(message) == bool([*objective.check_data(manifest)])


@pytest.mark.parametrize(
    ("words", "more", "message"),
    [
        (
            [PATCHES, "schedule: {kind: masked}", MASK, ERROR],
            (),
            "masked has no order of generation",
        ),
        ([PATCHES, CONTEXT, ITSELF, PLACE], (), "context has no order of generation"),
        ([FRAMES, ONE_BY_ONE, SHIFT, ERROR], SPEECH, "frames of a spectrogram cannot be shown"),
        (
            [PATCHES, GROUPS, QUERY, ERROR, FEATURES],
            (),
            "conditioned on features of the whole image",
        ),
        (
            [PATCHES, ROUNDS, MASK, DIFFUSION],
            (),
            "diffusion has no likelihoods; to generate, .*mix",
        ),
        ([PATCHES, ROUNDS, MASK, ERROR], (), "squared_error has no likelihoods"),
        ([PATCHES, GROUPS, QUERY, NORMALIZED], (), "set objective.density.normalize to false"),
    ],
)
def test_generation_errors(build_composition, words, more, message):
    objective, _ = build_composition(*words, more=more)
    with pytest.raises(UserError, match=message):
        generator_of(objective)
    warning = objective.config.objective.warning(objective.config)
    assert warning.startswith("this run will generate no images: ")
    assert re.search(message, warning)


@pytest.mark.parametrize(
    "words", [[PATCHES, ROUNDS, MASK, MIXTURE], [PATCHES, GROUPS, QUERY, ERROR]]
)
def test_no_warning_of_what_generates(build_composition, words):
    config = build_composition(*words)[0].config
    assert config.objective.warning(config) is None


@pytest.mark.parametrize("density", [ERROR, DIFFUSION])
def test_rounds_need_likelihoods(build_composition, tmp_path, density):
    objective, inference = build_composition(PATCHES, ROUNDS, MASK, density)
    with pytest.raises(UserError, match="rounds keeps .* has no likelihoods; to generate, set"):
        Sampler(inference, objective, tmp_path)


def test_place_density_reports_accuracy(build_composition):
    objective, inference = build_composition(PATCHES, CONTEXT, ITSELF, PLACE)
    sequence = objective.sequence(batch_of(photographs(3, 16)))
    predictions = inference.predictions(sequence.inputs)
    true = sequence.targets[0]
    hits = objective.outputs(predictions).argmax(-1) == true
    measures = objective.measures(predictions, sequence.targets)
    assert measures["accuracy"] == (hits.sum(), hits.numel())
    assert Places.of(objective).num_places == 16
    other, _ = build_composition(PATCHES, ONE_BY_ONE, SHIFT, ERROR)
    with pytest.raises(UserError, match="does not predict the positions"):
        Places.of(other)


@pytest.mark.parametrize(
    "words",
    [
        [GROUPS, QUERY, ERROR, MEMORY],
        ["schedule: {kind: one_by_one, prefix: 3}", CONTENT, ERROR, MEMORY],
        ["schedule: {kind: one_by_one, prefix: 10}", CONTENT, ERROR],
    ],
    ids=["groups", "prefix", "long prefix"],
)
def test_grids_of_a_run_give_what_the_model_needs(build_composition, words, tmp_path):
    """A run would end at its first grid."""
    objective, inference = build_composition(PATCHES, *words)
    batch = batch_of(photographs(2, 16))
    grid = Gallery(objective, tmp_path).plot(inference, batch, num_images=2)
    assert grid.shape[0] > 2 * 16
    with pytest.raises(UserError, match="images: give data.validation"):
        Gallery(objective, tmp_path, has_examples=False)


@pytest.mark.parametrize(
    "words",
    [
        [GROUPS, QUERY, DIFFUSION],
        [GROUPS, "asks: {kind: query, start: false}", ERROR],
        [CONTEXT, ITSELF, PLACE],
        [ROUNDS, MASK, MIXTURE],
        [CONTEXT, BRIDGE, ERROR],
    ],
)
def test_several_rows_hold_the_class(build_composition, words):
    """As many as the words count, in training and for features, and no two alike."""
    several = CLASSES.replace("3}", "3, count: 3}")
    objective, inference = build_composition(PATCHES, *words, several)
    batch, first = batch_of(photographs(2, 16)), inference.layers.modules[0]
    for inputs, for_features in (
        (objective.training_sequence(batch).inputs, False),
        (objective.feature_inputs(batch), True),
    ):
        hidden = LayerState.unpack(first(inputs), objective.core.carried_names).hidden
        rows = objective.grammar.rows(16, for_features=for_features)
        assert len(hidden) == rows.blocks
        assert not torch.allclose(hidden[0], hidden[1])
        assert not torch.allclose(hidden[1], hidden[2])
        assert inference.features(inputs).shape[1] == 2


def test_noise_of_tokens_that_are_all_known_has_the_rows_of_training(build_composition):
    objective, inference = build_composition(PATCHES, CONTEXT, BRIDGE, DIFFUSION)
    inputs = objective.inputs_from(photographs(2, 16))
    assert objective.outputs(inference.predictions(inputs)).shape[:2] == (2, 8)


@pytest.mark.parametrize("more", [[], [CLASSES]])
def test_grids_of_a_run_give_nothing_where_none_can_be_given(build_composition, more, tmp_path):
    objective, inference = build_composition(PATCHES, ROUNDS, MASK, MIXTURE, *more)
    batch = batch_of(photographs(2, 16))
    assert Gallery(objective, tmp_path).plot(inference, batch, num_images=2).shape[2] == 3


def test_likelihoods_say_what_they_are_given(build_composition):
    for dropout, text in (
        (0.25, "the class, but for the 25% that training drops"),
        (0, "the class"),
    ):
        classes = CLASSES.replace("3}", f"3, dropout: {dropout}}}")
        objective, _ = build_composition(PATCHES, ONE_BY_ONE, SHIFT, MIXTURE, classes)
        assert objective.condition.given_text == text


@pytest.mark.parametrize("modulation", ["none", "class", "class_and_row"])
def test_figures_of_places_are_of_no_class(build_composition, modulation):
    classes = CLASSES.replace("3}", f"3, modulation: {modulation}}}")
    objective, inference = build_composition(PATCHES, CONTEXT, ITSELF, PLACE, classes)
    images, index = photographs(3, 16), torch.arange(3)
    places = Places.of(objective)
    found = places.inputs_with(places.patches_of(images), places.context_of(index, 0.5))
    expected = objective.inputs_from(images, sample_index=index)
    torch.testing.assert_close(inference.predictions(found), inference.predictions(expected))
    without = CLASSES.replace("3}", "3, dropout: 0}")
    objective, _ = build_composition(PATCHES, CONTEXT, ITSELF, PLACE, without)
    with pytest.raises(UserError, match=r"objective\.condition\.dropout is 0"):
        Places.of(objective)


def test_features_need_a_null_label(build_composition):
    without = CLASSES.replace("3}", "3, dropout: 0}")
    objective, _ = build_composition(PATCHES, ONE_BY_ONE, SHIFT, ERROR, without)
    with pytest.raises(UserError, match=r"objective\.condition\.dropout is 0"):
        objective.feature_inputs(batch_of(photographs(2, 16)))
    tuned = ("finetune={num_classes: 3}", "data.validation=held", "training.validate_every=1")
    with pytest.raises(UserError, match=r"objective\.condition\.dropout: is 0"):
        build_composition(PATCHES, ONE_BY_ONE, SHIFT, ERROR, without, more=tuned)
    objective, inference = build_composition(PATCHES, ONE_BY_ONE, SHIFT, ERROR, CLASSES)
    batch = batch_of(photographs(2, 16))
    assert inference.features(objective.feature_inputs(batch)).shape == (3, 2, 16)


@pytest.mark.parametrize("schedule", [ONE_BY_ONE, GROUPS])
def test_features_behind_a_class_do_not_depend_on_the_density(build_composition, schedule):
    """The head denoises one blank patch for each row, also for the class in front."""
    batch = batch_of(photographs(2, 16))
    found = []
    for density in (DIFFUSION, ERROR):
        objective, inference = build_composition(PATCHES, schedule, QUERY, density, CLASSES)
        found.append(inference.features(objective.feature_inputs(batch)))
    assert found[0].shape == (3, 2, 16)
    assert torch.equal(*found)


def test_every_parameter_has_a_gradient(build_composition):
    for words in GENERATIVE.values():
        objective, inference = build_composition(*words)
        inputs = photographs(4, 16)
        if "latents" in words[0]:
            inputs = torch.rand(4, 2, 4, 4, 4)
        if "colors" in words[0]:
            inputs = torch.randint(32, (4, 256))
        batch = batch_of(inputs)
        sequence = objective.sequence(batch)
        predictions = run_layers(inference.layers.modules, sequence.inputs)
        objective.loss(predictions, sequence.targets).backward()
        missing = [
            name
            for name, parameter in inference.layers.named_parameters()
            if parameter.grad is None or not parameter.grad.abs().sum() > 0
        ]
        assert not missing, words


def test_decay_is_for_learned_tokens_alone(build_composition):
    """A class in front is no learned token, and its table keeps its own rule."""
    decays = BRIDGE.replace("visible,", "visible, tokens_decay: true,")
    objective, inference = build_composition(PATCHES, CONTEXT, decays, ERROR, CLASSES)
    assert dict(inference.layers.named_parameters())["embedding.front.weight"].shape == (4, 16)
    assert objective.check_unlabelled() is None


def test_embedded_patches_can_be_normalised(build_composition):
    """Before positions are added, against torch's own layer norm."""
    words = [PATCHES.replace("}", ", embedding_norm: true}"), ONE_BY_ONE, SHIFT, ERROR]
    _, inference = build_composition(*words)
    reader, patches = inference.layers.modules[0], torch.rand(2, 16, 48)
    weights = dict(reader.content.named_parameters())
    assert set(weights) == {"weight", "bias", "norm.weight", "norm.bias"}
    embedded = torch.nn.functional.linear(patches, weights["weight"], weights["bias"])
    expected = torch.nn.functional.layer_norm(
        embedded, (16,), weights["norm.weight"], weights["norm.bias"], 1e-5
    )
    torch.testing.assert_close(reader.embed_content(patches), expected)


PAGE = Path(__file__).parents[3] / "docs" / "compose.md"
SMALLER = {"1024": "12", "16384": "12", "1000": "3"}


def other_papers():
    """Return the words of each row of the page's table, with small vocabularies."""
    table = PAGE.read_text(encoding="utf-8").partition("## Other papers")[2]
    for line in table.partition("## Examples")[0].splitlines():
        if found := re.fullmatch(r"\| (\w+) \([^|]*\| ([^|]*`) \|([^|]*)\|", line):
            words = re.sub(r"\b\d{4,}\b", lambda number: SMALLER[number[0]], found[2])
            more = re.findall(r"`(model\..*?)`", found[3])
            yield pytest.param(re.findall(r"`(.*?)`", words), more, id=found[1])


def test_the_page_has_four_other_papers():
    assert [row.id for row in other_papers()] == ["MaskGIT", "LlamaGen", "SimMIM", "BEiT"]


@pytest.mark.parametrize(("words", "more"), other_papers())
def test_other_papers_of_the_page_train(build_composition, tmp_path, words, more):
    """The loss falls along its gradient."""
    words = [word.replace("{kind: patches", "{kind: patches, patch_size: 4") for word in words]
    words = [word.replace("{kind: ids", "{kind: ids, patch_size: 4") for word in words]
    tokenizer = write_untrained_run(tmp_path)
    words = [word.replace("runs/gvp_vqgan", str(tokenizer)) for word in words]
    reads_ids = "{kind: ids" in words[0]
    objective, inference = build_composition(*words, more=["data.image_size=16", *more])
    inputs = torch.randint(12, (2, 16)) if reads_ids else photographs(2, 16)
    sequence = objective.training_sequence(batch_of(inputs))
    layers = inference.layers.modules
    weights = [weight for layer in layers for weight in layer.parameters()]

    def loss():
        return objective.loss(run_layers(layers, sequence.inputs), sequence.targets)

    before = loss()
    slopes = torch.autograd.grad(before, weights, allow_unused=True)
    with torch.no_grad():
        for weight, slope in zip(weights, slopes, strict=True):
            if slope is not None:
                weight -= 1e-3 * slope
    assert loss().item() < before.item()


@pytest.mark.parametrize("normalize", ["false", "true"])
def test_an_absolute_error_is_of_hidden_values(build_composition, normalize):
    """Against torch's own loss (SimMIM, section 3.4: the mean over masked pixels)."""
    masked = "schedule: {kind: masked, mask_ratio: 0.6, count: exact}"
    density = f"density: {{kind: squared_error, norm: l1, normalize: {normalize}}}"
    objective, inference = build_composition(PATCHES, masked, MASK, density)
    images = photographs(2, 16)
    sequence = objective.sequence(batch_of(images))
    predictions = inference.predictions(sequence.inputs)
    targets = objective.reads.of(images)
    if normalize == "true":
        deviation = (targets.var(-1, keepdim=True) + 1e-6).sqrt()
        targets = (targets - targets.mean(-1, keepdim=True)) / deviation
    hidden = objective.schedule.draw(torch.arange(2)).groups > 0
    assert hidden.sum() == 20
    expected = torch.nn.functional.l1_loss(objective.outputs(predictions)[hidden], targets[hidden])
    torch.testing.assert_close(objective.loss(predictions, sequence.targets), expected)
    assert objective.likelihood is None


@pytest.mark.parametrize(
    ("words", "temperature"),
    [
        ([PALETTE, ROUNDS, MASK, CATEGORICAL], 4.5),
        ([f"reads: {IDS}", ROUNDS, MASK, CATEGORICAL], 4.5),
        ([PATCHES, ROUNDS, MASK, MIXTURE], 35.0),
        ([LATENTS, ROUNDS, MASK, MIXTURE], 35.0),
    ],
)
def test_the_choice_temperature_fits_the_likelihoods(build_composition, words, temperature):
    """GIVT's noise, for densities of many values, would drown the likelihoods of ids."""
    objective, _ = build_composition(*words)
    options = settings_of(objective, {"rounds": 3}).schedule
    assert (options.rounds, options.choice_temperature) == (3, temperature)
