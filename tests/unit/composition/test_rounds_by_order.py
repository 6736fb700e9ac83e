"""Rounds by order with rows for all tokens, and with an encoder of the known ones."""

import pytest
import torch
from compositions import BRIDGE, CLASSES, MIXTURE, PATCHES, config
from small_batches import photographs

from megavis.sampling.sampler import Sampler
from megavis.schedules.ordered_rounds import OrderedRoundOptions

pytestmark = pytest.mark.once

ROUNDS = "schedule: {kind: rounds, chosen: order, masking_deviation: 0.25, least_masking: 0.5}"
MASK = "asks: {kind: mask, norm: true}"
SEVERAL = "condition: {kind: labels, num_classes: 3, count: 4}"


@pytest.fixture(params=[(MASK, SEVERAL), (BRIDGE, CLASSES), (BRIDGE, SEVERAL)])
def made(request, build_paper):
    asks, condition = request.param
    words = ", ".join((PATCHES, ROUNDS, asks, MIXTURE, condition))
    return build_paper(config(f"{{name: compose, {words}}}"), std=0.3)


def test_asked_tokens_are_the_last_rows(made):
    """Rows of a round give the same predictions as all rows in another order."""
    model, inference = made
    images, options = torch.arange(2), OrderedRoundOptions(3)
    order = model.schedule.order_of(images, seed=0)
    tokens = model.given(model.tokens_of(photographs(2, 16)))
    tokens = tokens.gather(1, order[..., None].expand_as(tokens))
    known = model.condition.given({"labels": torch.tensor([0, 2])}, 2, order.device)
    step = model.schedule.first(order, num_given=5, options=options)
    assert (step.known, step.asked) == (5, slice(5, 7))
    outputs = []
    for wanted in (step, step.arrangement.prediction_targets):
        rows = model.rows(tokens[:, :5] if wanted is step and model.second_stack else tokens,
                          type(step)(**{**vars(step), "asked": wanted.asked}), known)  # fmt: skip
        with torch.no_grad():
            state = rows
            for layer in inference.layers.modules[:-1]:
                state = layer(state)
            outputs.append(model.outputs(inference.layers.modules[-1](state)))
    count = step.num_asked
    asked = outputs[1][:, -16:][:, step.asked]
    torch.testing.assert_close(outputs[0][:, -count:], asked, rtol=1e-4, atol=1e-4)


def test_completions_keep_what_is_given(made, tmp_path):
    model, inference = made
    sampler = Sampler(inference, model, tmp_path, {"rounds": 4})
    images = torch.arange(3)
    order = sampler.order_of(images)
    given = torch.randn(3, 6, 48)
    *steps, last = sampler.rounds(
        images, given=given, conditions={"labels": torch.tensor([0, 1, 2])}
    )
    assert len(steps) == 3
    assert torch.equal(last[:, :6], given)
    assert order.shape == (3, 16)
    alone = sampler.tokens(images[1:2], given=given[1:2], conditions={"labels": torch.tensor([1])})
    torch.testing.assert_close(alone, last[1:2], rtol=1e-4, atol=1e-4)


def test_samples_are_functions_of_image_and_seed(made, tmp_path):
    model, inference = made
    first, again, other = (
        Sampler(inference, model, tmp_path, {"rounds": 3}, seed=seed).tokens(
            torch.arange(2), conditions={"labels": torch.tensor([1, 1])}
        )
        for seed in (0, 0, 1)
    )
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
