"""The attention figure shows the weights with which blocks mix their values, by place."""

import itertools

import numpy as np
import pytest
import torch
from tiny import BLOCK_OBJECTIVES, VIT, tiny

from megavis.data.loading.loader import Batch
from megavis.evaluation import token_relations
from megavis.evaluation.token_relations import (
    attention_weights,
    measure_attention,
    measure_correlations,
)
from megavis.model.core import Block

pytestmark = pytest.mark.once

MODEL = {**VIT, "num_layers": 3, "hidden_size": 32, "num_attention_heads": 4}
OBJECTIVES = {
    "mae": "{name: mae, patch_size: 4,"
    " decoder: {num_layers: 1, hidden_size: 16, num_attention_heads: 2}}",
    "darl": "{name: darl, patch_size: 4}",
    "memory": BLOCK_OBJECTIVES["memory"],
}
FULL = {"num_classes": 3, "visibility": "full"}


@pytest.mark.parametrize(
    ("name", "keys", "finetune"),
    [
        ("mae", {}, None),
        ("mae", {"qk_norm": True}, None),
        ("darl", {"positions": "rope_2d"}, FULL),
        ("darl", {"positions": "rope_2d", "qk_norm": True}, FULL),
        ("mae", {"qk_norm": True}, {"num_classes": 3}),
        ("memory", {}, FULL),
    ],
)
@torch.no_grad()
def test_weights_are_those_of_the_blocks(build_paper, name, keys, finetune):
    text = tiny(
        OBJECTIVES[name],
        model={**MODEL, **keys},
        data={"image_size": 16},
        training={"validate_every": 1},
        validates=True,
        finetune=finetune,
    )
    objective, inference = build_paper(text, std=1.0)
    # Without an encoder's and a decoder's, whose heads and rows are others.
    blocks = [each for each in inference.layers.feature_layers() if isinstance(each, Block)]
    assert len(blocks) == 3
    values, mixed = [], []
    for block in blocks:
        attention = block.self_attention
        attention.linear_qkv.register_forward_hook(lambda _, __, out: values.append(out))
        attention.linear_proj.register_forward_hook(lambda _, given, __: mixed.append(given[0]))
    images = torch.randint(256, (2, 16, 16, 3), dtype=torch.uint8)
    inputs = objective.backbone.inputs_for_features(images, None)
    found = attention_weights(inference, inputs)
    assert len(found) == len(mixed) == len(blocks)
    for weights, (joined, _), result in zip(found, values, mixed, strict=True):
        value = joined.unflatten(2, (4, 3, 8))[:, :, :, 2].permute(1, 2, 0, 3)
        expected = (weights @ value).permute(2, 0, 1, 3).flatten(2)
        torch.testing.assert_close(expected, result, rtol=1e-4, atol=1e-4)
        assert weights.std() > 0.005, "uniform weights would fit anything"
    # What was kept of the first image.
    assert all("attend" not in vars(block.self_attention) for block in blocks)


@pytest.fixture
def ordered(build_paper, monkeypatch):
    """A classifier on DARL in an order that is not raster; three images, and their inputs."""
    text = tiny(
        "{name: darl, patch_size: 4, order: round_robin}",
        model={**MODEL, "positions": "rope_2d"},
        data={"image_size": 16},
        training={"validate_every": 1},
        validates=True,
        finetune=FULL,
    )
    objective, inference = build_paper(text, std=1.0)
    images = torch.randint(256, (3, 16, 16, 3), dtype=torch.uint8)
    batch = Batch(images, torch.zeros(3, dtype=torch.int64), torch.arange(3))
    monkeypatch.setattr(token_relations, "evaluation_batches", lambda *_, **__: [batch])
    for name in ("shuffled", "representative"):
        monkeypatch.setattr(token_relations, name, lambda dataset, *_: dataset)
    model = objective.backbone
    (order,) = model.schedule.for_features(torch.zeros(1, dtype=torch.int64)).order.tolist()
    assert order != list(range(16))
    return objective, inference, model.feature_inputs(batch), order


def test_attention_is_averaged_by_place_in_the_image(ordered):
    objective, inference, inputs, order = ordered
    weights = attention_weights(inference, inputs)[0].double()
    entropies = torch.special.entr(weights).sum(3).mean((0, 2))
    weights = weights[:, :, -16:, -16:]
    sums, counts = torch.zeros(4, 7, 7).double(), torch.zeros(7, 7).double()
    for query, key in itertools.product(range(16), range(16)):
        (row, column), (other, across) = (divmod(order[each], 4) for each in (query, key))
        place = other - row + 3, across - column + 3
        sums[:, *place] += weights[:, :, query, key].mean(0)
        counts[place] += 1
    found = measure_attention(inference, objective, range(3), num_images=3)
    torch.testing.assert_close(found.entropies[0].double(), entropies, rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(found.maps[0].double(), sums / counts, rtol=1e-5, atol=1e-7)


def test_correlation_is_of_places_in_the_image(ordered):
    objective, inference, inputs, order = ordered
    tokens = inference.last_features(inputs)
    expected = np.zeros((16, 16))
    for image in tokens[:, -16:].numpy():
        found = np.corrcoef(image)
        for row, column in itertools.product(range(16), range(16)):
            expected[order[row], order[column]] += found[row, column] / 3
    within = measure_correlations(inference, objective, range(3), num_images=3).within
    np.testing.assert_allclose(within.numpy(), expected, atol=1e-5)
