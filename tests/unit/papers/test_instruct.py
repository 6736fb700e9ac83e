"""Rows that alternate between places and tokens, against a decoder in plain loops.

The reference computes the released code's equations on the same weights, row by row.
"""

import math

import pytest
import torch
import torch.nn.functional as F
from compositions import (
    BOTH,
    CATEGORICAL,
    CLASSES,
    DIFFUSION,
    ERROR,
    INSTRUCT,
    LATENTS,
    MIXTURE,
    ONE_BY_ONE,
    PALETTE,
    PATCHES,
    QUERY,
    RANDOM,
)
from small_batches import batch_of, photographs, run_layers
from tiny import tiny

from megavis.config.errors import UserError
from megavis.sampling.sampler import Sampler
from megavis.schedules.one_by_one import RoundOptions

pytestmark = pytest.mark.once

SIDE, WIDTH, HEADS = 4, 16, 2
WORDS = f"{PALETTE}, {RANDOM}, {INSTRUCT}, {CATEGORICAL}, {CLASSES}"


@pytest.fixture
def make(build_paper):
    """Build a model of 4² ids, with the norms and the positions of the released code."""

    def make(*words, positions="rope_2d"):
        text = tiny(
            f"{{name: compose, {WORDS}}}", data={"image_size": SIDE}, model={"positions": positions}
        )
        return build_paper(text, *words, std=0.3)

    return make


def palette_ids(count=2, seed=3):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(32, (count, SIDE * SIDE), generator=generator)


# The decoder in plain loops.


def turned(vector, place):
    """Rotate a vector of a head by row and column: half of its pairs each; zeros at place -2."""
    if place == -2:
        return torch.zeros_like(vector)
    pairs, turned = vector.view(-1, 2), []
    quarter = len(pairs) // 2
    for number, (real, imaginary) in enumerate(pairs.tolist()):
        coordinate = place // SIDE if number < quarter else place % SIDE
        if place == -1:  # the start token: one column to the left of the first cell
            coordinate = 0 if number < quarter else -1
        angle = coordinate * 10_000 ** (-(number % quarter) / quarter)
        cos, sin = math.cos(angle), math.sin(angle)
        turned += [real * cos - imaginary * sin, real * sin + imaginary * cos]
    return torch.tensor(turned)


def by_head(vector, place):
    return torch.cat([turned(part, place) for part in vector.view(HEADS, -1)])


def normed(weights, name, x):
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5) * weights[f"{name}.weight"]


def decoded(weights, rows, places):
    """Return the logits of all rows `[s, h]`, each attending to those before it and to itself."""
    size = WIDTH // HEADS
    for i in range(2):
        block = f"blocks.{i}"
        y = normed(weights, f"{block}.input_layernorm", rows)
        joined = y @ weights[f"{block}.self_attention.linear_qkv.weight"].T
        query, key, value = joined.view(len(rows), HEADS, 3, size).unbind(2)
        mixed = torch.zeros(len(rows), HEADS, size)
        for head in range(HEADS):
            for t in range(len(rows)):
                own = turned(query[t, head], places[t])
                scores = [own @ turned(key[s, head], places[s]) for s in range(t + 1)]
                shares = (torch.stack(scores) / size**0.5).softmax(0)
                mixed[t, head] = shares @ value[: t + 1, head]
        rows = rows + mixed.flatten(1) @ weights[f"{block}.self_attention.linear_proj.weight"].T
        y = normed(weights, f"{block}.pre_mlp_layernorm", rows)
        y = y @ weights[f"{block}.mlp.linear_fc1.weight"].T
        y = y * torch.sigmoid(1.702 * y)
        rows = rows + y @ weights[f"{block}.mlp.linear_fc2.weight"].T
    return normed(weights, "head.norm", rows) @ weights["head.linear.weight"].T


def instructed(weights, ids, order, label, num_known, num_asked):
    """Return logits `[num_asked, v]` for the tokens after `num_known` ones; `ids` in the order."""
    rows, places = [weights["embedding.start.weight"][label]], [-1]
    for t in range(num_known):
        rows += [by_head(weights["embedding.query"], order[t])]
        rows += [weights["embedding.content.weight"][ids[t]]]
        places += [order[t]] * 2
    for t in range(num_known, num_known + num_asked):
        rows += [by_head(weights["embedding.query"], order[t])]
        places += [order[t]]
    return decoded(weights, torch.stack(rows), places)[-num_asked:]


def weights_of(inference):
    return {name: each.detach() for name, each in inference.layers.named_parameters()}


def test_logits_match_a_decoder_in_plain_loops(make):
    objective, inference = make()
    weights, ids, labels = weights_of(inference), palette_ids(), torch.tensor([2, 0])
    order = objective.schedule.draw(torch.arange(2)).order
    assert not torch.equal(order[0], order[1])
    inputs = objective.inputs_from(ids, sample_index=torch.arange(2), labels=labels)
    logits = objective.outputs(inference.predictions(inputs))
    losses = []
    for image in range(2):
        own = ids[image, order[image]].tolist()
        places, label = order[image].tolist(), int(labels[image])
        expected = torch.cat(
            [instructed(weights, own, places, label, t, 1) for t in range(SIDE * SIDE)]
        )
        torch.testing.assert_close(logits[image], expected, rtol=1e-4, atol=1e-4)
        losses.append(F.cross_entropy(expected, ids[image, order[image]]))
    batch = batch_of(ids)
    sequence = objective.sequence(type(batch)(batch.inputs, labels, batch.sample_index))
    loss = objective.loss(inference.predictions(sequence.inputs), sequence.targets)
    torch.testing.assert_close(loss, sum(losses) / 2, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("zeros", [False, True])
def test_shifted_rows_match_a_decoder_with_a_start_token_of_zeros(build_paper, zeros):
    """LlamaGen: the class begins the rows, and its queries and keys are zeros in released code."""
    asks = f"asks: {{kind: shift, place: content, zero_start: {str(zeros).lower()}}}"
    text = tiny(
        f"{{name: compose, {PALETTE}, {ONE_BY_ONE}, {asks}, {CATEGORICAL}, {CLASSES}}}",
        data={"image_size": SIDE},
        model={"positions": "rope_2d"},
    )
    objective, inference = build_paper(text, std=0.3)
    weights, ids, label = weights_of(inference), palette_ids(1), torch.tensor([2])
    logits = objective.outputs(inference.predictions(objective.inputs_from(ids, labels=label)))
    rows = [weights["embedding.start.weight"][2], *weights["embedding.content.weight"][ids[0, :-1]]]
    places = [-2 if zeros else -1, *range(SIDE * SIDE - 1)]
    expected = decoded(weights, torch.stack(rows), places)
    torch.testing.assert_close(logits[0], expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("positions", ["learned", "sincos", "rope_1d", "rope_2d"])
def test_instructions_name_their_place(make, positions):
    """Two places exchanged exchange the predictions of both, for the same known tokens."""
    objective, inference = make(positions=positions)
    ids, order = palette_ids(1), torch.arange(SIDE * SIDE)
    swapped = order.clone()
    swapped[[14, 15]] = swapped[[15, 14]]
    pair = [
        objective.outputs(inference.predictions(objective.inputs_from(ids, order=each[None])))
        for each in (order, swapped)
    ]
    torch.testing.assert_close(pair[0][:, :14], pair[1][:, :14])
    assert (pair[0][:, 14] - pair[1][:, 14]).abs().max() > 1e-3


def test_a_token_depends_on_all_tokens_before_it_alone(build_composition):
    objective, inference = build_composition(PATCHES, RANDOM, INSTRUCT, ERROR)
    images, order = photographs(2, 16), objective.schedule.draw(torch.arange(2)).order
    before = objective.outputs(inference.predictions(objective.inputs_from(images)))
    for place in range(16):
        other = objective.reads.of(images)
        other[torch.arange(2), order[:, place]] += 1.0
        inputs = objective.inputs_from(objective.reads.to_images(other))
        moved = (objective.outputs(inference.predictions(inputs)) != before).any(-1)
        assert torch.equal(moved, (torch.arange(16) > place).expand(2, -1))


@pytest.mark.parametrize("recomputed", ["full", "selective"])
def test_gradients_are_the_same_when_activations_are_recomputed(make, recomputed):
    gradients = []
    for kind in ("none", recomputed):
        objective, inference = make(f"parallel.activation_checkpointing={kind}")
        sequence = objective.training_sequence(batch_of(palette_ids()))
        for layer in inference.layers.modules:
            layer.train()
        state = run_layers(inference.layers.modules, sequence.inputs)
        objective.loss(state, sequence.targets).backward()
        named = inference.layers.named_parameters()
        gradients.append({name: each.grad for name, each in named})
    assert gradients[0]["embedding.query"].abs().min() > 0
    torch.testing.assert_close(gradients[1], gradients[0])


def test_work_counts_two_rows_for_a_token(make):
    """Rows pass through all blocks, and half of them through the head."""
    objective, _ = make()
    rows, width = 2 * SIDE * SIDE, WIDTH
    matrices = 2 * rows * (4 * width**2 + 2 * width * 4 * width)
    attention = 4 * width * rows * (rows + 1) / 2
    head = 2 * (rows // 2) * width * 32
    assert objective.flops_per_image() == 3 * (2 * (matrices + attention) + head)


# Generation.


def greedy(weights, order, label, rounds, given=(), guidance=0.0):
    """Generate with the most likely ids, in plain loops without a cache.

    With guidance, logits of the class are moved away from those without one.
    """
    no_class = len(weights["embedding.start.weight"]) - 1
    ids, count, number = list(given), SIDE * SIDE - len(given), 0
    while len(ids) < SIDE * SIDE:
        done = len(ids) - len(given)
        # As in the released code, where the first step always asks for one token.
        known = min(int((1.0 - math.cos(math.pi / 2 * (number + 1) / rounds)) * count + 1), count)
        asked = 1 if number == 0 else min(max(known - done, 1), count - done)
        logits, free = (
            instructed(weights, ids, order, each, len(ids), asked) for each in (label, no_class)
        )
        logits = logits + guidance * (logits - free)
        ids += logits.argmax(1).tolist()
        number += 1
    return ids, number


@pytest.mark.parametrize(
    ("rounds", "num_given", "passes"), [(6, 0, 6), (4, 5, 4), (16, 0, 16), (3, 0, 3)]
)
def test_several_tokens_at_once_match_plain_loops(make, tmp_path, rounds, num_given, passes):
    objective, inference = make()
    weights, labels, images = weights_of(inference), torch.tensor([1, 2]), torch.arange(2)
    sampler = Sampler(inference, objective, tmp_path, {"rounds": rounds, "temperature": 0.0})
    order = sampler.order_of(images)
    given = palette_ids()[:, :num_given]
    options = {"conditions": {"labels": labels}, "given": given if num_given else None}
    steps = [each.clone() for each in sampler.rounds(images, **options)]
    assert len(steps) == passes
    for image in range(2):
        places, label = order[image].tolist(), int(labels[image])
        expected, _ = greedy(weights, places, label, rounds, given[image].tolist())
        assert steps[-1][image].tolist() == expected


@pytest.mark.parametrize("rounds", [6, 16])
def test_guided_tokens_match_plain_loops(make, tmp_path, rounds):
    objective, inference = make()
    weights, labels, images = weights_of(inference), torch.tensor([1, 2]), torch.arange(2)
    options = {"rounds": rounds, "temperature": 0.0, "guidance": 2.0}
    sampler = Sampler(inference, objective, tmp_path, options)
    order = sampler.order_of(images)
    drawn = [*sampler.rounds(images, conditions={"labels": labels})][-1]
    for image in range(2):
        places, label = order[image].tolist(), int(labels[image])
        plain, _ = greedy(weights, places, label, rounds)
        expected, _ = greedy(weights, places, label, rounds, guidance=2.0)
        assert drawn[image].tolist() == expected != plain


@pytest.mark.parametrize("rounds", [None, 2, 5, 11, 16])
@pytest.mark.parametrize("density", [CATEGORICAL, MIXTURE])
def test_cache_changes_no_sample(build_composition, tmp_path, rounds, density):
    reads = PALETTE if density == CATEGORICAL else PATCHES
    more = ["data.image_size=4"] if density == CATEGORICAL else []
    built = build_composition(reads, RANDOM, INSTRUCT, density, CLASSES, more=more)
    objective, inference = built
    sampler = Sampler(inference, objective, tmp_path, {"rounds": rounds})
    options = {"conditions": {"labels": torch.tensor([0, 1, 2])}}
    images = torch.arange(3)
    with_cache = sampler.tokens(images, **options)
    without = sampler.tokens(images, cached=False, **options)
    torch.testing.assert_close(with_cache, without, rtol=1e-3, atol=1e-4)


def test_as_many_rounds_as_tokens_sample_one_by_one(make, tmp_path):
    objective, inference = make()
    images = torch.arange(3)
    samples = [
        Sampler(inference, objective, tmp_path, {"rounds": rounds}).tokens(images)
        for rounds in (None, SIDE * SIDE, 2)
    ]
    assert torch.equal(samples[0], samples[1])
    assert not torch.equal(samples[0], samples[2])


def test_numbers_of_rounds_are_those_of_the_released_code():
    """88 passes for 256 tokens ask for one to five tokens."""
    options, counts = RoundOptions(88), []
    while sum(counts) < 256:
        counts.append(options.num_asked(len(counts), sum(counts), 256))
    known, expected = 1, [1]
    for step in range(1, 88):
        until = min(int((1.0 - math.cos(math.pi / 2 * (step + 1) / 88)) * 256 + 1), 256)
        expected.append(max(until - known, 1))
        known += expected[-1]
    assert counts == expected
    assert (len(counts), known, max(counts), counts[:25]) == (88, 256, 5, [*[1] * 24, 2])
    assert [RoundOptions(1).num_asked(0, 0, 9), RoundOptions(2).num_asked(0, 0, 9)] == [9, 1]


@pytest.mark.parametrize("asks", [QUERY, INSTRUCT])
def test_queries_can_be_asked_together_too(build_composition, tmp_path, asks):
    objective, inference = build_composition(PATCHES, RANDOM, asks, ERROR)
    sampler = Sampler(inference, objective, tmp_path, {"rounds": 4})
    steps = [each.clone() for each in sampler.rounds(torch.arange(2))]
    assert len(steps) == 4
    assert steps[-1].abs().sum() > 0


def test_latents_are_denoised_at_several_places_at_once(build_composition, tmp_path):
    """A combination that is no paper: these rows with a diffusion decoder on latents."""
    words = [LATENTS, RANDOM, INSTRUCT, DIFFUSION, CLASSES]
    objective, inference = build_composition(*words)
    sampler = Sampler(inference, objective, tmp_path, {"rounds": 4})
    options = {"conditions": {"labels": torch.tensor([0, 2])}}
    images = torch.arange(2)
    tokens, uncached = (sampler.tokens(images, cached=each, **options) for each in (True, False))
    assert tokens.shape == (2, 16, 4)
    torch.testing.assert_close(tokens, uncached, rtol=1e-3, atol=1e-4)
    latents = torch.randn(2, 4, 4, 4, generator=torch.Generator().manual_seed(0))
    sequence = objective.sequence(batch_of(latents))
    state = run_layers(inference.layers.modules, sequence.inputs)
    objective.loss(state, sequence.targets).backward()
    query = dict(inference.layers.named_parameters())["embedding.query"]
    assert query.grad.abs().min() > 0


def test_beam_search_keeps_likely_sequences(make, tmp_path):
    objective, inference = make()
    images = torch.arange(3)
    search = Sampler(inference, objective, tmp_path, {"beams": 3, "fans": 3})
    found, uncached = search.tokens(images), search.tokens(images, cached=False)
    assert torch.equal(found, uncached)


# Mistakes.


def test_beam_search_takes_one_token_at_a_time(make, tmp_path):
    objective, inference = make()
    with pytest.raises(UserError, match=r"leave out rounds, or beams and fans"):
        Sampler(inference, objective, tmp_path, {"rounds": 4, "beams": 2})
    with pytest.raises(UserError, match=r"rounds must be 1 or more, not 0"):
        Sampler(inference, objective, tmp_path, {"rounds": 0})


def test_rows_of_held_tokens_have_no_rounds(build_composition, tmp_path):
    objective, inference = build_composition(PATCHES, RANDOM, BOTH, ERROR)
    with pytest.raises(UserError, match=r"rounds does not apply to this run of compose"):
        Sampler(inference, objective, tmp_path, {"rounds": 4})


# Features.


def test_features_are_of_all_rows(build_composition):
    objective, inference = build_composition(PATCHES, ONE_BY_ONE, INSTRUCT, ERROR)
    seen = []
    head = inference.layers.modules[-1]
    hook = head.norm.register_forward_hook(lambda _, given, out: seen.append(out.shape[0]))
    features = inference.features(objective.inputs_for_features(photographs(2, 16), None))
    hook.remove()
    assert features.shape == (3, 2, 16)
    assert seen == [32]
