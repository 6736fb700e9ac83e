"""One weight for queries, keys and values: its parts, their gradients and its first values."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from megavis.model.attention import join_heads, projected_heads, split_heads
from megavis.model.parameters import Initialization, normal, xavier_uniform
from megavis.model.tensor_parallel import multiply_parts

HEADS, SIZE = 2, 3
WIDTH = HEADS * SIZE


class Projection(nn.Linear):
    head_size = SIZE


def projection(*, bias):
    torch.manual_seed(0)
    return Projection(WIDTH, 3 * WIDTH, bias=bias).double()


def draw(*shape):
    return torch.randn(*shape, dtype=torch.float64, requires_grad=True)


@pytest.mark.parametrize("bias", [False, True])
def test_gradients_of_parts_are_difference_quotients(bias):
    layer = projection(bias=bias)
    parameters = [*layer.parameters()]

    def run(reading, seen, *_):
        return multiply_parts(layer, reading, seen)

    assert torch.autograd.gradcheck(run, (draw(2, 2, WIDTH), draw(3, 2, WIDTH), *parameters))


@pytest.mark.parametrize("bias", [False, True])
def test_parts_are_those_of_the_whole_product(bias):
    layer, reading, seen = projection(bias=bias), draw(4, 2, WIDTH), draw(5, 2, WIDTH)
    of_reading = projected_heads((layer(reading), None), SIZE)
    of_seen = projected_heads((layer(seen), None), SIZE)
    found = projected_heads(multiply_parts(layer, reading, seen), SIZE)
    for one, other in zip(found, (of_reading[0], *of_seen[1:]), strict=True):
        torch.testing.assert_close(one, other)
    alone = multiply_parts(layer, reading, None)[0], multiply_parts(layer, None, seen)[1]
    for one, other in zip(alone, multiply_parts(layer, reading, seen), strict=True):
        torch.testing.assert_close(one, other)


def test_frozen_inputs_and_weights_get_no_gradient():
    layer = projection(bias=True).requires_grad_(False)
    reading, memory = draw(2, 1, WIDTH), draw(3, 1, WIDTH).detach()
    sum(part.sum() for part in multiply_parts(layer, reading, memory)).backward()
    rows = split_heads(layer.weight, HEADS)[0]
    torch.testing.assert_close(reading.grad, rows.sum(0).expand_as(reading))
    assert (memory.grad, layer.weight.grad, layer.bias.grad) == (None, None, None)


def test_rows_of_a_part_are_whole_heads():
    query, key, value = (torch.randn(WIDTH, 4) for _ in range(3))
    joined = join_heads(query, key, value, HEADS)
    first = joined.chunk(HEADS)[1]
    assert torch.equal(first, torch.cat([each[SIZE:] for each in (query, key, value)]))
    for found, part in zip(split_heads(joined, HEADS), (query, key, value), strict=True):
        assert torch.equal(found, part)


@pytest.mark.parametrize("fill", [normal(0.5), xavier_uniform])
def test_first_weights_are_drawn_for_queries_and_for_pairs(build, tmp_path, fill):
    """Each by the shape of its own matrix, on which the bounds of Xavier's draws depend."""
    from megavis.model.attention import Attention
    from megavis.model.core import megatron_config

    objective, _ = build(tmp_path / "c.yaml")
    config = megatron_config(objective.config, objective.core.groups, objective.core.stack)
    torch.manual_seed(3)
    module = Attention(config, objective.core.groups, Initialization(*[fill] * 5), "full")
    width, heads = config.hidden_size, config.num_attention_heads
    torch.manual_seed(3)
    query, pairs = torch.empty(width, width), torch.empty(2 * width, width)
    fill(query)
    fill(pairs)
    found = split_heads(module.linear_qkv.weight, heads)
    keys, values = pairs.unflatten(0, (heads, 2, -1)).unbind(1)
    for part, drawn in zip(found, (query, keys.flatten(0, 1), values.flatten(0, 1)), strict=True):
        assert torch.equal(part, drawn)
    hidden = torch.randn(2, 1, width)
    assert torch.equal(F.linear(hidden, module.linear_qkv.weight), module.linear_qkv(hidden)[0])
