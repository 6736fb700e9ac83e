"""MP3 against its definition: predict the position of each patch from a visible subset."""

import math

import numpy as np
import pytest
import torch
from small_batches import batch_of, photographs, run_layers
from tiny import tiny
from torch.utils._python_dispatch import TorchDispatchMode

from megavis.config.errors import UserError
from megavis.evaluation import token_relations
from megavis.evaluation.token_relations import (
    has_square_features,
    measure_correlations,
)
from megavis.grammar.same_run import source_differences
from megavis.model.flops import forward_flops
from megavis.papers.mp3.place_figures import Places

CONFIG = tiny(
    "{name: mp3, patch_size: 4, mask_ratio: 0.5}",
    model={"num_layers": 3, "hidden_size": 32, "num_attention_heads": 4}
    | {"normalization": "layer_norm", "add_bias": True},
)
PLACES = 16


@pytest.fixture
def make(build_paper):
    """Build a model of sixteen patches."""
    return lambda *words, **options: build_paper(CONFIG, *words, std=0.3, **options)


def draw_images(count=3):
    return photographs(count, 16, seed=0)


@pytest.mark.parametrize("class_token", [True, False])
def test_predictions_are_permutation_equivariant(make, class_token):
    objective, inference = make(f"objective.class_token={str(class_token).lower()}")
    interface = Places.of(objective)
    patches = interface.patches_of(draw_images())
    context = interface.context_of(torch.arange(3), 0.5)
    order = torch.randperm(PLACES, generator=torch.Generator().manual_seed(1))
    plain = objective.outputs(inference.predictions(interface.inputs_with(patches, context)))
    # Patch order[i] moves to position i, so the patch at p moves to argsort(order)[p].
    moved = interface.inputs_with(patches[:, order], order.argsort()[context])
    permuted = objective.outputs(inference.predictions(moved))
    torch.testing.assert_close(permuted, plain[:, order], rtol=1e-5, atol=1e-5)
    assert not torch.allclose(plain[:, 0], plain[:, 1], atol=1e-2)


def test_correlations_are_means_over_images_and_over_pairs_of_neighbours(make, monkeypatch):
    """Also if the last batch has a single image."""
    objective, inference = make()
    images = draw_images(5)
    tokens = inference.last_features(objective.feature_inputs(batch_of(images)))

    def batches(dataset, *, batch_size, limit):
        assert dataset == ["in random order"]
        return (batch_of(images[start : start + 4]) for start in (0, 4))

    monkeypatch.setattr(token_relations, "evaluation_batches", batches)
    monkeypatch.setattr(token_relations, "shuffled", lambda dataset: ["in random order"])
    found = measure_correlations(inference, objective, range(9), num_images=5)
    for pairs, mean in (
        ([(number, number) for number in range(5)], found.within),
        ([(number, number + 1) for number in range(4)], found.between),
    ):
        both = [
            np.corrcoef(tokens[one, -16:], tokens[other, -16:])[:16, 16:] for one, other in pairs
        ]
        np.testing.assert_allclose(mean.numpy(), np.mean(both, axis=0), atol=1e-5)
    assert float(found.between.max()) < 0.999


def test_a_single_image_has_no_correlation_with_another(make):
    objective, inference = make()
    with pytest.raises(UserError, match="--num-images must be at least 2"):
        measure_correlations(inference, objective, range(9), num_images=1)


def test_no_masking_equals_full_attention(make):
    objective, inference = make("objective.mask_ratio=0.0")
    _, full = make("objective.mask_ratio=0.0", visibility="full")
    inputs = objective.sequence(batch_of(draw_images())).inputs
    torch.testing.assert_close(
        inference.predictions(inputs), full.predictions(inputs), rtol=1e-5, atol=1e-5
    )
    features = objective.feature_inputs(batch_of(draw_images()))
    torch.testing.assert_close(
        inference.predictions(features), full.predictions(inputs), rtol=1e-5, atol=1e-5
    )


def test_masked_patches_are_not_attended_to(make):
    objective, inference = make()
    interface = Places.of(objective)
    patches = interface.patches_of(draw_images(1))
    context = interface.context_of(torch.arange(1), 0.5)
    masked = [p for p in range(PLACES) if p not in context[0].tolist()]
    watched, seen = masked[0], context[0].tolist()
    patches.requires_grad_()
    predictions = run_layers(inference.layers.modules, interface.inputs_with(patches, context))
    objective.outputs(predictions)[0, watched].sum().backward()
    moved = (patches.grad[0].abs().sum(-1) > 0).nonzero().flatten().tolist()
    assert moved == sorted([watched, *seen])


def test_keys_and_values_are_computed_for_context_only(make):
    objective, inference = make("objective.mask_ratio=0.75")
    counts = []
    for block in inference.layers.modules[1:-1]:
        block.self_attention.linear_qkv.register_forward_hook(
            lambda _, inputs, __: counts.append(len(inputs[1]))
        )
    inference.predictions(objective.sequence(batch_of(draw_images())).inputs)
    assert counts == [4 + 1] * 3


def test_loss_and_accuracy_match_loops(make):
    objective, _ = make()
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(3, PLACES, PLACES, generator=generator)
    targets = objective.sequence(batch_of(draw_images())).targets
    nats, right, among = 0.0, 0, 0
    for image in range(3):
        for patch in range(PLACES):
            row = logits[image, patch].double().tolist()
            nats += math.log(sum(math.exp(x) for x in row)) - row[patch]
            right += row.index(max(row)) == patch
            among += row[patch] in sorted(row)[-5:]
    assert float(objective.loss(logits, targets)) == pytest.approx(nats / 48, rel=1e-5)
    assert objective.measures(logits, targets) == {"accuracy": (right, 48), "top5": (among, 48)}
    assert 0 < right < among < 48
    assert objective.measures_accuracy


def test_context_depends_on_the_sample_only(make):
    objective, _ = make()
    interface = Places.of(objective)
    whole = interface.context_of(torch.arange(6), 0.5)
    assert torch.equal(interface.context_of(torch.arange(4, 6), 0.5), whole[4:])
    assert not torch.equal(whole[0].sort().values, whole[1].sort().values)
    assert all(len(set(row.tolist())) == 8 for row in whole)


def test_context_is_uniform(make):
    objective, _ = make()
    context = Places.of(objective).context_of(torch.arange(4000), 0.75)
    assert context.shape == (4000, 4)
    shares = torch.bincount(context.flatten(), minlength=PLACES) / 4000
    # Five standard deviations of a mean of 4,000 draws with probability 1/4.
    assert (shares - 0.25).abs().max() < 5 * (0.25 * 0.75 / 4000) ** 0.5


def test_flops_depend_on_the_mask_ratio(make):
    objective, _ = make()
    model = objective.config.model.model_copy(update={"num_layers": 12, "hidden_size": 768})
    n, c, h = PLACES + 1, 8 + 1, 768
    block = n * (2 * h * h + 8 * h * h) + c * 2 * h * h + 2 * n * c * h
    by_hand = 3 * 2 * (12 * block + n * h * PLACES)
    assert 3 * forward_flops(model, objective.workload()) == pytest.approx(by_hand)


SPEECH = (
    "data.image_size=0",
    "data.frames=[20,6]",
    "model.positions=sincos",
    "objective.given_ratio=0.1",
    "objective.mask_ratio=0.0",
)


def test_speech_frames_with_given_positions(make):
    objective, inference = make(*SPEECH)
    frames = torch.randn(3, 20, 6, generator=torch.Generator().manual_seed(0)).half()
    batch = batch_of(frames)
    sequence = objective.sequence(batch)
    patches, context, given_positions = sequence.inputs
    # TC-ResNet, whose preparation the paper keeps intact (section 4.1), scales nothing.
    assert torch.equal(patches, frames.float())
    with pytest.raises(UserError, match="a grid of 1 × 20, which is not square"):
        has_square_features(objective)
    assert (context.shape, given_positions.shape) == ((3, 21), (3, 2))
    embedding = inference.layers.modules[0]
    hidden = embedding(sequence.inputs)[0][1:].transpose(0, 1)
    added = hidden - embedding.content(patches)
    for image in range(3):
        for place in range(20):
            waves = [place / 10_000 ** (2 * i / 32) for i in range(16)]
            wave = torch.tensor([*map(math.sin, waves), *map(math.cos, waves)])
            wanted = wave if place in given_positions[image].tolist() else torch.zeros(32)
            torch.testing.assert_close(added[image, place], wanted, rtol=1e-4, atol=1e-4)
            assert int(sequence.targets[0][image, place]) == place
            counts = bool(sequence.targets[1][image, place])
            assert counts == (place not in given_positions[image].tolist())
    logits = torch.randn(3, 20, 20, generator=torch.Generator().manual_seed(1)) + 2 * torch.eye(20)
    predicted = [
        (logits[b, p], p)
        for b in range(3)
        for p in range(20)
        if p not in given_positions[b].tolist()
    ]
    nats = sum(-float(row.log_softmax(-1)[p]) for row, p in predicted)
    assert len(predicted) == 54
    assert float(objective.loss(logits, sequence.targets)) == pytest.approx(nats / 54)
    right = sum(int(row.argmax()) == p for row, p in predicted)
    among = sum(p in row.topk(5).indices for row, p in predicted)
    measures = objective.measures(logits, sequence.targets)
    assert measures == {"accuracy": (right, 54), "top5": (among, 54)}
    assert right < int((logits.argmax(-1) == torch.arange(20)).sum())
    # Features, as fine-tuning, are given all positions.
    assert objective.feature_inputs(batch)[2].tolist() == [list(range(20))] * 3


def test_frames_are_normalized_by_a_key(make):
    objective, _ = make(*SPEECH, "data.normalize_frames=true")
    frames = 3 + 2 * torch.randn(3, 20, 6, generator=torch.Generator().manual_seed(0)).half()
    patches = objective.sequence(batch_of(frames)).inputs[0]
    mean, deviation = frames.float().mean(1), frames.float().std(1, correction=0)
    expected = (frames.float() - mean[:, None]) / deviation[:, None]
    torch.testing.assert_close(patches, expected, rtol=1e-3, atol=1e-3)


def test_finetuning_reads_frames_like_pretraining(make):
    plain, normalized = (
        make(*SPEECH, f"data.normalize_frames={value}")[0] for value in ("false", "true")
    )
    assert not list(source_differences(plain.config, plain.config))
    (text,) = source_differences(normalized.config, plain.config)
    assert "was trained with data.normalize_frames true" in text


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["objective.patch_size=5"], "5 does not divide data.image_size 16"),
        (["model.positions=learned"], "learned reveals what the model has to predict"),
        (["model.positions=relative_2d"], "relative_2d reveals what the model has to predict"),
        (
            ["objective.given_ratio=0.1"],
            "which none cannot encode; set model.positions to learned or sincos",
        ),
        (
            ["objective.given_ratio=0.5", "model.positions=sincos"],
            "0.5 leaves no context token without its position; lower it below 0.46875, or set",
        ),
        (  # Three of 16 patches are given their position, and two are context.
            ["objective.given_ratio=0.17", "objective.mask_ratio=0.82", "model.positions=sincos"],
            "0.17 leaves no context token without its position; lower it below 0.09375, or set",
        ),
        (
            ["objective.given_ratio=0.05", "objective.mask_ratio=0.9", "model.positions=sincos"],
            "0.05 leaves no context token without its position; set it to 0",
        ),
        (["data.image_size=0"], "must be the side of the images in pixels"),
        (["data.frames=[20,6]"], "is for images, and data.frames for recordings: set only one"),
        (["data.time_shift=0.1"], "is for recordings, which data.frames describes"),
        (["data.background_noise=noise.npz"], "is for recordings, which data.frames describes"),
        (["data.normalize_frames=true"], "is for recordings, which data.frames describes"),
        (
            ["data.image_size=0", "data.frames=[20,6]", "data.time_shift=0.2"],
            "must be shorter than 20 frames of 10 ms",
        ),
        (
            ["parallel.tensor_model_parallel_size=2", "parallel.sequence_parallel=true"],
            "17 rows are not divisible",
        ),
    ],
)
def test_incompatible_keys(make, words, message):
    with pytest.raises(UserError, match=message):
        make(*words)


def test_image_size_is_checked(make):
    objective, _ = make()
    with pytest.raises(UserError, match=r"expects uint8 \[b, 16, 16, 3\]"):
        objective.inputs_from(photographs(2, 12))


def test_attention_weights_match_the_block(make):
    from megavis.evaluation.token_relations import attention_weights

    objective, inference = make()
    inputs = objective.feature_inputs(batch_of(draw_images()))
    block = inference.layers.modules[1]
    seen = {}
    parts = {"kv": block.self_attention.linear_qkv, "out": block.self_attention.linear_proj}
    hooks = [
        parts["kv"].register_forward_hook(lambda _, __, out: seen.update(kv=out[1])),
        parts["out"].register_forward_hook(lambda _, given, __: seen.update(mixed=given[0])),
    ]
    weights = attention_weights(inference, inputs)[0]
    for hook in hooks:
        hook.remove()
    value = seen["kv"].unflatten(2, (2, -1, 8))[:, :, 1].permute(1, 2, 0, 3)
    mixed = (weights @ value).permute(2, 0, 1, 3).flatten(2)
    torch.testing.assert_close(mixed, seen["mixed"], rtol=1e-4, atol=1e-4)


def test_loss_has_a_deterministic_kernel(make):
    """On a GPU, nll_loss2d raises under `training.deterministic`; nll_loss does not."""
    objective, _ = make()
    called = set()

    class Recorder(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            called.add(function.name())
            return function(*args, **(kwargs or {}))

    logits = torch.randn(2, 16, 16, requires_grad=True)
    true = torch.arange(16).expand(2, -1)
    with Recorder():
        losses = objective.density.per_token_loss(logits, true)
        losses.sum().backward()
    assert "aten::nll_loss_backward" in called
    assert not [name for name in called if "nll_loss2d" in name]
    expected = -logits.detach().double().log_softmax(-1).diagonal(dim1=1, dim2=2)
    torch.testing.assert_close(losses.double(), expected, rtol=1e-5, atol=1e-5)
