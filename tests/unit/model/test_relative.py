"""Relative position bias: its entry for each offset, and its effect on attention."""

import math

import pytest
import torch
from tiny import tiny

from megavis.config.errors import UserError
from megavis.evaluation.token_relations import attention_weights
from megavis.model.positions import NOWHERE, RelativeBias, place_coordinates


def config(objective="{name: mp3, patch_size: 4, mask_ratio: 0.5}"):
    return tiny(
        objective,
        model={"normalization": "layer_norm", "add_bias": True, "positions": "relative_2d"},
        data={"image_size": 12},
        training={"validate_every": 1},
        finetune={"num_classes": 3, "read_out": "first"},
        validates=True,
    )


def test_bias_is_indexed_by_offset():
    bias = RelativeBias(2, (2, 3))
    torch.nn.init.normal_(bias.weight)
    cells = place_coordinates(torch.tensor([[NOWHERE, *range(6)]]), 3)
    found = bias(cells, cells)
    assert found.shape == (1, 2, 7, 7)
    # Row offsets -1 to 1, column offsets -2 to 2 within each; then three entries off the grid.
    order = [(row, column) for row in (-1, 0, 1) for column in (-2, -1, 0, 1, 2)]
    for query in range(7):
        for key in range(7):
            if query and key:
                row, column = (cells[0, key] - cells[0, query]).tolist()
                entry = order.index((row, column))
            else:
                entry = (
                    14 + {(True, False): 1, (False, True): 2, (True, True): 3}[query == 0, key == 0]
                )
            assert torch.equal(found[0, :, query, key], bias.weight[:, entry])


@pytest.mark.parametrize("visibility", ["kept", "full"])
def test_attention_adds_bias_to_logits(build_paper, visibility):
    objective, inference = build_paper(config(), f"finetune.visibility={visibility}")
    attention = inference.layers.modules[1].self_attention
    seen = {}
    attention.linear_qkv.register_forward_hook(lambda _, __, out: seen.update(joined=out))
    attention.linear_proj.register_forward_hook(lambda _, given, __: seen.update(mixed=given[0]))
    images = torch.randint(256, (2, 12, 12, 3), dtype=torch.uint8)
    drawn = attention_weights(inference, objective.inputs_from(images))[0]
    first, pairs = seen["joined"]
    if pairs is None:
        query, key, value = first.unflatten(2, (2, 3, 8)).unbind(3)
    else:
        query = first.unflatten(2, (2, 8))
        key, value = pairs.unflatten(2, (2, 2, 8)).unbind(2)
    cells = [(-1, -1), *((row, column) for row in range(3) for column in range(3))]
    bias = attention.relative_bias(torch.tensor([cells]), torch.tensor([cells]))[0]
    for image in range(2):
        for head in range(2):
            for i in range(10):
                logits = [
                    float(query[i, image, head] @ key[j, image, head]) / math.sqrt(8)
                    + float(bias[head, i, j])
                    for j in range(10)
                ]
                shares = torch.tensor(logits).softmax(0)
                torch.testing.assert_close(drawn[image, head, i], shares, rtol=1e-4, atol=1e-5)
                expected = shares @ value[:, image, head]
                mixed = seen["mixed"].unflatten(2, (2, 8))[i, image, head]
                torch.testing.assert_close(mixed, expected, rtol=1e-4, atol=1e-5)


def test_zero_bias_is_equivalent_to_no_positions(build_paper):
    objective, inference = build_paper(config())
    _, without = build_paper(config(), "model.positions=none")
    for block in inference.layers.modules[1:-1]:
        torch.nn.init.zeros_(block.self_attention.relative_bias.weight)
    inputs = objective.inputs_from(torch.randint(256, (2, 12, 12, 3), dtype=torch.uint8))
    named = dict(without.layers.named_parameters())
    for name, parameter in inference.layers.named_parameters():
        if name in named:
            named[name].data.copy_(parameter.data)
    torch.testing.assert_close(inference.predictions(inputs), without.predictions(inputs))


@pytest.mark.parametrize("paper", ["{name: igpt}", "{name: darl, patch_size: 4}"])
def test_unsupported_papers_raise(build_paper, paper):
    text = config(paper)
    with pytest.raises(UserError, match="relative_2d is for models that predict positions"):
        build_paper(text)
