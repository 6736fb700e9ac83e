"""RAR against the equations of its released code in plain torch, on the same random weights."""

import math

import pytest
import torch
import torch.nn.functional as F
from rar_equations import (
    CLASSES,
    HEADS,
    IDS,
    LAYERS,
    TOKENS,
    WIDTH,
    generator_logits,
    ours,
    released,
)
from released_tensors import copy_named
from small_batches import HeldOutIds, run_layers
from tiny import VIT, tiny

from megavis.config.errors import UserError
from megavis.data.loading.loader import Batch
from megavis.evaluation.likelihood import measure_likelihood
from megavis.sampling.sampler import Sampler

pytestmark = pytest.mark.once

CONFIG = tiny(
    f"{{name: rar, patch_size: 4, vocabulary_size: {IDS}, num_classes: {CLASSES}}}",
    model={
        **VIT,
        "qk_norm": True,
        "num_layers": LAYERS,
        "hidden_size": WIDTH,
        "num_attention_heads": HEADS,
    },
    training={"steps": 100, "batch_size": 8},
)


@pytest.fixture
def make(build_paper):
    """Build a model of sixteen ids."""
    return lambda *words: build_paper(CONFIG, *words, std=0.2)


# Equal to it.


def batch(step, count=4):
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(IDS, (count, TOKENS), generator=generator)
    labels = torch.tensor([0, 4, -1, 2])[:count]
    return Batch(ids, labels, torch.arange(7, 7 + count), step)


@pytest.mark.parametrize("step", [0, 62, 99, None])
def test_logits_and_loss_equal_the_released_generator(make, step):
    """In random, mixed and raster orders; step 62 is in the middle of the annealing."""
    tensors = released()
    objective, inference = make("objective.label_dropout=0.5")
    copy_named(inference, ours(tensors))
    samples = batch(step)
    sequence = objective.training_sequence(samples)
    predictions = run_layers(inference.layers.modules, sequence.inputs)
    orders = objective.schedule.at(step).draw(samples.sample_index).order.tolist()
    is_raster = [order == list(range(TOKENS)) for order in orders]
    assert any(is_raster) == (step != 0)
    assert all(is_raster) == (step in (99, None))

    known = sequence.inputs[4].tolist()
    assert CLASSES in known
    losses = []
    logits = objective.outputs(predictions)
    for image, order in enumerate(orders):
        ids = samples.inputs[image][order]
        label = None if known[image] == CLASSES else known[image]
        assert label in (None, int(samples.labels[image]))
        expected = generator_logits(tensors, ids, label, order)[:-1]
        torch.testing.assert_close(logits[image], expected, rtol=1e-4, atol=1e-4)
        losses.append(F.cross_entropy(expected, ids))
    loss = objective.loss(predictions, sequence.targets)
    torch.testing.assert_close(loss, sum(losses) / 4, rtol=1e-4, atol=0)


def test_likelihood_is_the_sum_over_the_released_logits(make):
    """In raster order; an image without a label counts as one without a class."""
    tensors, labels = released(), [2, 0, -1]
    objective, inference = make()
    copy_named(inference, ours(tensors))
    images = HeldOutIds(IDS, TOKENS, labels)
    result = measure_likelihood("rar", 7, inference, objective, images)
    nats, raster = 0.0, list(range(TOKENS))
    for ids, label in zip(images.ids, labels, strict=True):
        logits = generator_logits(tensors, ids, None if label < 0 else label, raster)[:-1]
        nats -= float(logits.double().log_softmax(1)[raster, ids].sum())
    assert result.nats_per_image == pytest.approx(nats / 3, rel=1e-5)
    assert result.bits_per_dimension == pytest.approx(nats / 3 / TOKENS / math.log(2), rel=1e-5)
    assert (result.num_images, result.dimensions_per_image) == (3, TOKENS)


@pytest.mark.parametrize("cached", [True, False])
@pytest.mark.parametrize(("scale", "power"), [(1.0, None), (4.0, None), (7.0, 1.5), (3.0, 0.0)])
def test_samples_equal_the_released_loop(make, tmp_path, cached, scale, power):
    """Likeliest ids, step by step, with guidance that grows with a power of the steps."""
    tensors = released()
    objective, inference = make()
    copy_named(inference, ours(tensors))
    options = {"temperature": 0.0, "guidance": scale - 1, "guidance_power": power}
    sampler = Sampler(inference, objective, tmp_path, options)
    labels = torch.tensor([3, 1])
    known = {"labels": labels}
    found = sampler.tokens(torch.arange(2), conditions=known, cached=cached)
    raster = list(range(TOKENS))
    for image, label in enumerate(labels.tolist()):
        ids = []
        for step in range(TOKENS):
            share = (1 - math.cos((step / TOKENS) ** (power or 0.0) * math.pi)) / 2
            now = scale if power is None else (scale - 1) * share + 1
            given, free = (
                generator_logits(tensors, ids, each, raster)[-1] for each in (label, None)
            )
            ids.append(int((free + now * (given - free)).argmax()))
        assert found[image].tolist() == ids


def test_at_the_start_blocks_are_the_identity(make):
    """The maps of adaLN-Zero start at zero, so that no branch adds anything."""
    objective, _ = make()
    plans = {plan.name: plan for plan in objective.layer_plans()}
    block = plans["blocks.1"].build()
    state = torch.randn(TOKENS + 1, 2, WIDTH), torch.randn(TOKENS + 1, 2, WIDTH)
    hidden, vectors = block(state)
    assert torch.equal(hidden, state[0])
    assert torch.equal(vectors, state[1])


# Keys.


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["objective.patch_size=5"], "5 does not divide data.image_size 16"),
        (["objective.randomness=[0.75,0.5]"], r"objective.randomness: \[0.75, 0.5\] ends before"),
        (["objective.randomness=[0.75,1.5]"], "objective.randomness"),
        (["model.positions=rope_2d"], "rope_2d cannot add two places to a row; set it to learned"),
    ],
)
def test_incompatible_keys(make, words, message):
    with pytest.raises(UserError, match=message):
        make(*words)


def test_runs_of_ids_without_a_tokenizer_are_accepted(make):
    objective, _ = make("objective.class_token=false", "objective.adaptive_norms=none")
    assert objective.num_skipped == 0
    assert objective.config.objective.cannot_generate(objective.config) is None
