"""Temperature, top-k and top-p against a reference in plain Python."""

import math

import numpy as np
import pytest
import torch

from megavis.config.errors import UserError
from megavis.densities.categorical import CategoricalOptions

pytestmark = pytest.mark.once


def reference(logits, *, temperature=1.0, top_k=None, top_p=None):
    """Return the filtered probability of each id for one row of logits."""
    if temperature == 0:
        return [float(i == logits.index(max(logits))) for i in range(len(logits))]
    weights = [math.exp((x - max(logits)) / temperature) for x in logits]
    likeliest_first = sorted(range(len(logits)), key=lambda i: (-weights[i], i))
    kept = likeliest_first[:top_k]
    if top_p is not None:
        total, reached, nucleus = sum(weights[i] for i in kept), 0.0, []
        for i in kept:
            nucleus.append(i)
            reached += weights[i] / total
            if reached >= top_p:
                break
        kept = nucleus
    total = sum(weights[i] for i in kept)
    return [weights[i] / total if i in kept else 0.0 for i in range(len(logits))]


@pytest.mark.parametrize("temperature", [0.0, 0.3, 1.0, 2.5])
@pytest.mark.parametrize("top_k", [None, 1, 3, 100])
@pytest.mark.parametrize("top_p", [None, 0.05, 0.5, 0.9])
def test_probabilities_match_reference(temperature, top_k, top_p):
    torch.manual_seed(1)
    logits = torch.randn(6, 11) * 2
    settings = {"temperature": temperature, "top_k": top_k, "top_p": top_p}

    got = CategoricalOptions(**settings).probabilities(logits)

    expected = [reference(row, **settings) for row in logits.tolist()]
    np.testing.assert_allclose(got.numpy(), expected, atol=1e-12)


def test_top_k_breaks_ties_by_lower_id():
    got = CategoricalOptions(top_k=2).probabilities(torch.zeros(1, 5))
    np.testing.assert_allclose(got.numpy(), [[0.5, 0.5, 0, 0, 0]])


def test_draw_inverts_the_cumulative_distribution():
    torch.manual_seed(2)
    logits, uniforms = torch.randn(200, 7), torch.rand(200)

    got = CategoricalOptions(top_k=4).draw(logits, uniforms)

    for row, uniform, id_ in zip(logits.tolist(), uniforms.tolist(), got.tolist(), strict=True):
        probabilities = reference(row, top_k=4)
        below = sum(probabilities[:id_])
        assert below <= uniform < below + probabilities[id_]


@pytest.mark.parametrize("uniform", [0.0, 1.0 - 2.0**-24])
def test_extreme_uniforms_never_draw_a_filtered_id(uniform):
    logits = torch.tensor([[-50.0, 1.0, 0.5, 1.0, -50.0]])
    got = CategoricalOptions(top_k=3).draw(logits, torch.tensor([uniform]))
    assert got.item() in (1, 2, 3)


def test_tiny_temperature_is_greedy():
    torch.manual_seed(3)
    logits = torch.randn(50, 9)
    for temperature in (0.0, 1e-6):
        got = CategoricalOptions(temperature=temperature).draw(logits, torch.rand(50))
        assert got.tolist() == logits.argmax(1).tolist()


@pytest.mark.parametrize(
    ("settings", "share", "weight"),
    [
        ({"guidance": 0.0}, 0.5, 0.0),
        ({"guidance": 2.0}, 0.5, 2.0),
        ({"guidance": 2.0, "guidance_power": 1.0}, 0.0, 0.0),
        ({"guidance": 2.0, "guidance_power": 1.0}, 0.5, 1.0),
        ({"guidance": 2.0, "guidance_power": 2.0}, 0.5, 2.0 * (1 - math.cos(math.pi / 4)) / 2),
        ({"guidance": 3.0, "guidance_power": 0.0}, 0.3, 3.0),
        ({"guidance": 3.0, "guidance_schedule": "constant"}, 0.3, 3.0),
        ({"guidance": 3.0, "guidance_schedule": "linear"}, 0.25, 0.75),
    ],
)
def test_guidance_leads_away_from_what_no_class_predicts(settings, share, weight):
    given, free = torch.randn(2, 3, 2, 5, generator=torch.Generator().manual_seed(4))
    got = CategoricalOptions(**settings).guided(torch.cat([given, free]), share)
    for image in range(3):
        for place in range(2):
            for number in range(5):
                one, other = float(given[image, place, number]), float(free[image, place, number])
                expected = (1 + weight) * one - weight * other
                assert float(got[image, place, number]) == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize(
    "settings",
    [
        {"guidance": -0.1},
        {"guidance": 1.0, "guidance_power": -1.0},
        {"guidance_power": 1.0},
        {"guidance_schedule": "linear"},
        {"guidance": 1.0, "guidance_schedule": "cosine"},
        {"guidance": 1.0, "guidance_power": 1.0, "guidance_schedule": "linear"},
        {"temperature": -0.1},
        {"temperature": math.inf},
        {"top_k": 0},
        {"top_p": 0.0},
        {"top_p": 1.1},
    ],
)
def test_out_of_range_options_raise(settings):
    with pytest.raises(UserError, match="must|needs"):
        CategoricalOptions(**settings)


@pytest.mark.parametrize("weight", [1.5, 7.0])
def test_guidance_of_bf16_logits_is_not_rounded_again(weight):
    torch.manual_seed(4)
    given, free = (3 * torch.randn(2, 8, 1, 512)).bfloat16()
    options = CategoricalOptions(guidance=weight)

    got = options.probabilities(options.guided(torch.cat([given, free]), 0.0)[:, 0])

    with_class, without = (each[:, 0].double().numpy() for each in (given, free))
    weights = np.exp((1 + weight) * with_class - weight * without)
    np.testing.assert_allclose(got.numpy(), weights / weights.sum(1, keepdims=True), rtol=1e-4)
