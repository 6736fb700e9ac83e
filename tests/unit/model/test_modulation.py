"""Modulated blocks against plain loops; for whole models see `tests/unit/papers/test_rar.py`."""

import pytest
import torch
import torch.nn.functional as F
from compositions import BOTH, CATEGORICAL, GROUPS, MIXTURE, ONE_BY_ONE, PALETTE, PATCHES, config
from small_batches import batch_of, photographs, run_layers

from megavis.model.flops import Workload, forward_flops

pytestmark = pytest.mark.once

WIDTH, HEADS = 16, 2
CLASS = "condition: {kind: labels, num_classes: 3, modulation: class}"
ROW = "condition: {kind: labels, num_classes: 3, modulation: class_and_row}"
QUERIES = "asks: {kind: query, start: false}"


@pytest.fixture
def build(build_paper):
    def build(*words, more=()):
        objective = f"{{name: compose, {', '.join(words)}}}"
        return build_paper(config(objective), *more, std=0.3)

    return build


def linear(module, x):
    return F.linear(x, module.weight, module.bias)


def block_by_hand(block, x, vectors, sees, first):
    """Compute a block `[s, h]` of one image, whose rows from `first` on go on."""
    parts = F.linear(F.silu(vectors), block.modulation.linear.weight, block.modulation.linear.bias)
    shift, scale, gate, shift_later, scale_later, gate_later = parts.split(WIDTH, dim=-1)
    norm = block.input_layernorm
    y = F.layer_norm(x, (WIDTH,), norm.weight, norm.bias, 1e-5) * (1 + scale) + shift
    heads = linear(block.self_attention.linear_qkv, y).view(len(x), HEADS, 3, WIDTH // HEADS)
    query, key, value = heads.permute(2, 1, 0, 3)
    scores = query @ key.transpose(1, 2) / (WIDTH // HEADS) ** 0.5
    scores = scores.masked_fill(~sees, -torch.inf)
    mixed = (scores.softmax(-1) @ value).transpose(0, 1).flatten(1)
    x = x + gate * linear(block.self_attention.linear_proj, mixed)
    norm = block.pre_mlp_layernorm
    y = F.layer_norm(x, (WIDTH,), norm.weight, norm.bias, 1e-5) * (1 + scale_later) + shift_later
    y = linear(block.mlp.linear_fc2, F.gelu(linear(block.mlp.linear_fc1, y)))
    return (x + gate_later * y)[first:]


@pytest.mark.parametrize("checkpointing", ["none", "selective", "full"])
def test_blocks_of_queries_are_modulated_by_the_class(build, checkpointing):
    """Of two streams; the last block goes on with the queries, and so does the last norm."""
    more = (f"parallel.activation_checkpointing={checkpointing}",)
    objective, inference = build(PATCHES, GROUPS, QUERIES, MIXTURE, CLASS, more=more)
    sequence = objective.training_sequence(batch_of(photographs(2, 16)))
    first, *blocks, head = inference.layers.modules
    state = first(sequence.inputs)
    names = objective.core.carried_names
    carried = dict(zip(names, state[1:], strict=True))
    x, vectors = state[0], carried["modulation"]
    table = first.start if hasattr(first, "start") else first.front
    assert torch.equal(vectors, table.weight[3].expand_as(vectors))
    content, queries = carried["content_groups"], carried["query_groups"]
    reach = torch.cat([content + 1, queries], 1)
    count = content.shape[1]
    rows = []
    for image in range(2):
        y, given = x[:, image], vectors[:, image]
        sees = torch.zeros(len(y), len(y), dtype=torch.bool)
        sees[:, :count] = content[image][None] < reach[image][:, None]
        for number, block in enumerate(blocks):
            y = block_by_hand(block, y, given, sees, count if number == len(blocks) - 1 else 0)
        scale = linear(head.modulation.linear, F.silu(given[count:]))
        norm = head.norm
        y = F.layer_norm(y, (WIDTH,), norm.weight, norm.bias, 1e-5)
        rows.append(linear(head.linear, y * (1 + scale[:, WIDTH:]) + scale[:, :WIDTH]))
    predictions = run_layers(inference.layers.modules, sequence.inputs)
    torch.testing.assert_close(predictions, torch.stack(rows), rtol=1e-4, atol=1e-4)
    plain = torch.autograd.grad(sum(r.square().sum() for r in rows), table.weight)[0]
    predictions.square().sum().backward()
    torch.testing.assert_close(table.weight.grad, plain, rtol=1e-3, atol=1e-3)


def test_vectors_of_rows_are_added_to_the_class(build):
    objective, inference = build(
        PALETTE, ONE_BY_ONE, BOTH, CATEGORICAL, ROW, more=("data.image_size=4",)
    )
    ids = torch.randint(32, (2, 16), generator=torch.Generator().manual_seed(0))
    first = inference.layers.modules[0]
    for inputs in (
        objective.training_sequence(batch_of(ids)).inputs,
        objective.inputs_for_features(ids, None),
        objective.inputs_from(ids),
    ):
        vectors = first(inputs)[1]
        expected = first.start.weight[3] + first.row_vectors
        torch.testing.assert_close(vectors, expected[:, None].expand_as(vectors))
    given = objective.inputs_from(ids, labels=torch.tensor([2, 0]))
    vectors = first(given)[1]
    assert torch.equal(vectors[5, 0], first.start.weight[2] + first.row_vectors[5])
    assert torch.equal(vectors[0, 1], first.start.weight[0] + first.row_vectors[0])


def test_maps_are_counted(build):
    """Six vectors of each row in a block, and two before the head."""
    objective, _ = build(PALETTE, ONE_BY_ONE, BOTH, CATEGORICAL, ROW, more=("data.image_size=4",))
    work, model = objective.workload(), objective.config.model
    plain = Workload.of_one_stream(16, 32, causal=True)
    more = forward_flops(model, work) - forward_flops(model, plain)
    assert more == 2 * 16 * WIDTH**2 * (6 * model.num_layers + 2)
