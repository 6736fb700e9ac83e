"""An MLP decoder of a width of its own, with positions, against its equations in plain torch."""

import math

import pytest
import torch
import torch.nn.functional as F
from compositions import CONTENT, ONE_BY_ONE, PATCHES, QUERY, RANDOM
from small_batches import batch_of, photographs

from megavis.planning.parameters import count_parameters
from megavis.sampling.sampler import Sampler

pytestmark = pytest.mark.once
WIDTH, LAYERS = 24, 3
OWN = "asks: {kind: shift, place: content, start: false}"
DRAWN = "schedule: {kind: one_by_one, prefix: drawn}"


def error(*words):
    more = "".join(f", {word}" for word in words)
    return f"density: {{kind: squared_error, decoder: mlp, decoder_layers: {LAYERS}{more}}}"


WIDE = error(f"decoder_width: {WIDTH}")
PLACED = error(f"decoder_width: {WIDTH}", "decoder_positions: true")


def waves(index, width):
    """Return sines and cosines of a coordinate, `[width]`, by a loop over the frequencies."""
    count = width // 2
    angles = [index / 10_000 ** (i / count) for i in range(count)]
    return torch.tensor([*map(math.sin, angles), *map(math.cos, angles)])


def decoded(inference, hidden, places):
    """Return what the head makes of the last block's output `[s, b, h]`, from its equations."""
    weights = {
        name.removeprefix("head."): value.detach()
        for name, value in inference.layers.named_parameters()
        if name.startswith("head.")
    }

    def norm(x, name):
        given = weights[f"{name}.weight"], weights[f"{name}.bias"]
        return F.layer_norm(x, x.shape[-1:], *given, 1e-5)

    def linear(x, name):
        return F.linear(x, weights[f"{name}.weight"], weights.get(f"{name}.bias"))

    x = linear(norm(hidden.transpose(0, 1), "norm"), "entry")
    if places is not None:
        encoded = [
            [torch.cat([waves(p % 4, WIDTH // 2), waves(p // 4, WIDTH // 2)]) for p in row]
            for row in places.tolist()
        ]
        x = x + torch.stack([torch.stack(row) for row in encoded])
    for i in range(LAYERS):
        name = f"decoder.layers.{i}"
        inner = F.gelu(linear(norm(x, f"{name}.norm"), f"{name}.mlp.linear_fc1"))
        x = x + linear(inner, f"{name}.mlp.linear_fc2")
    return linear(norm(x, "decoder.norm"), "decoder.linear")


@pytest.mark.parametrize("biases", ["true", "false"])
@pytest.mark.parametrize(
    "words",
    [
        [PATCHES, DRAWN, OWN, WIDE],
        [PATCHES, DRAWN, OWN, PLACED],
        [PATCHES, RANDOM, QUERY, PLACED],
    ],
)
def test_decoder_equals_its_equations(build_composition, words, biases):
    objective, inference = build_composition(*words, more=[f"model.add_bias={biases}"])
    assert ("head.entry.bias" in dict(inference.layers.named_parameters())) == (biases == "true")
    plan = objective.schedule.draw(torch.arange(2))
    # Query rows stand for the asked places, content rows for those that they hold.
    places = plan.order.expand(2, -1) if PLACED in words else None
    seen = []
    hook = inference.layers.modules[-1].norm.register_forward_hook(
        lambda _, entering, __: seen.append(entering[0])
    )
    sequence = objective.sequence(batch_of(photographs(2, 16)))
    predictions = inference.predictions(sequence.inputs)
    hook.remove()
    torch.testing.assert_close(
        predictions, decoded(inference, seen[0], places), rtol=1e-4, atol=1e-4
    )


def test_cached_rows_get_their_own_positions(build_composition, tmp_path):
    words = [PATCHES, "schedule: {kind: one_by_one, prefix: 1}", OWN, PLACED]
    objective, inference = build_composition(*words)
    sampler = Sampler(inference, objective, tmp_path, seed=3)
    given = objective.reads.of(photographs(2, 16))[:, :1]
    images = torch.arange(2)
    found = sampler.tokens(images, given=given)
    whole = sampler.tokens(images, given=given, cached=False)
    torch.testing.assert_close(found, whole, rtol=1e-4, atol=1e-4)


def test_a_decoder_of_another_width_counts_its_operations(build_composition):
    """The difference to the model's own width, by hand: 16 rows, patches of 48 values."""
    flops = {}
    for name, density in (("own", error()), ("wide", WIDE)):
        objective, _ = build_composition(PATCHES, ONE_BY_ONE, CONTENT, density)
        flops[name] = objective.flops_per_image()
        assert count_parameters(objective)
    hidden = 16
    layer = 2 * 2 * 4 * (WIDTH**2 - hidden**2)
    more = LAYERS * layer + 2 * hidden * WIDTH + 2 * (WIDTH - hidden) * 48
    assert flops["wide"] - flops["own"] == 3 * 16 * more
