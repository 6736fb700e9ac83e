"""Position embeddings against complex-number rotations and MAE's sine-cosine embedding."""

import math

import numpy as np
import pytest
import torch

from megavis.model.kernels import apply_rotary
from megavis.model.parameters import normal
from megavis.model.positions import NOWHERE, START, Positions, sincos, turns


def cells(height, width):
    return torch.arange(height * width)[None]


def draw(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


def rotate(heads, coordinates, scale=1.0):
    return apply_rotary(heads, *turns(coordinates, heads.shape[-1], scale=scale))


def rotate_with_complex_numbers(head, coordinates):
    """Rotate one vector `[d]` by z · e^(i m θ) per axis (DARL, appendix D)."""
    turned, width = [], len(head) // len(coordinates)
    for axis, place in enumerate(coordinates):
        part = head[axis * width : (axis + 1) * width]
        for i in range(width // 2):
            angle = place * 10_000.0 ** (-2 * i / width)
            z = complex(part[2 * i], part[2 * i + 1]) * complex(math.cos(angle), math.sin(angle))
            turned += [z.real, z.imag]
    return torch.tensor(turned)


@pytest.mark.parametrize("axes", [1, 2])
def test_rotation_matches_complex_multiplication(axes):
    heads, coordinates = draw(2, 3, 5, 16), torch.randint(0, 20, (2, 5, axes))
    turned = rotate(heads, coordinates)
    for b in range(2):
        for n in range(3):
            for s in range(5):
                expected = rotate_with_complex_numbers(
                    heads[b, n, s].tolist(), coordinates[b, s].tolist()
                )
                torch.testing.assert_close(turned[b, n, s], expected, rtol=1e-4, atol=1e-5)


def test_rotary_scores_depend_only_on_relative_coordinates():
    query, key = draw(1, 1, 4, 16), draw(1, 1, 4, 16).flip(2)
    here = torch.tensor([[[0, 3], [5, 1], [2, 2], [7, 0]]])
    moved = here + torch.tensor([11, 4])

    def scores(places):
        return rotate(query, places) @ rotate(key, places).transpose(2, 3)

    torch.testing.assert_close(scores(here), scores(moved), rtol=1e-4, atol=1e-4)
    assert not torch.allclose(scores(here), query @ key.transpose(2, 3))


def test_rotary_scale_multiplies_coordinates():
    heads, places = draw(1, 2, 3, 8), torch.tensor([[[2], [6], [4]]])
    torch.testing.assert_close(rotate(heads, places, scale=0.5), rotate(heads, places // 2))


def test_sincos_scale_interpolates_coordinates():
    fine, coarse = (
        Positions("sincos", height=n, width=n, hidden_size=16, fill=normal(0), scale=3 / n)
        for n in (6, 3)
    )
    everywhere = fine(torch.zeros(1, 36, 16), cells(6, 6)).view(6, 6, 16)
    expected = coarse(torch.zeros(1, 9, 16), cells(3, 3)).view(3, 3, 16)
    torch.testing.assert_close(everywhere[::2, ::2], expected)
    between = sincos(torch.tensor([[0.5, 1.5]]), 16)[0]
    torch.testing.assert_close(everywhere[1, 3], between)


def added(side, hidden_size):
    """Return the sine-cosine embedding of each cell of a square grid, `[side², hidden_size]`."""
    kind = Positions("sincos", height=side, width=side, hidden_size=hidden_size, fill=normal(0))
    return kind(torch.zeros(1, side**2, hidden_size), cells(side, side))[0]


@pytest.mark.parametrize(("side", "hidden_size"), [(3, 16), (14, 768), (24, 1024)])
def test_sincos_matches_plain_loops(side, hidden_size):
    # MAE's released get_2d_sincos_pos_embed: "here w goes first".
    expected = np.empty((side**2, hidden_size))
    quarter = hidden_size // 4
    for row in range(side):
        for column in range(side):
            waves = []
            for place in (column, row):
                angles = [place / 10_000 ** (i / quarter) for i in range(quarter)]
                waves += [math.sin(a) for a in angles] + [math.cos(a) for a in angles]
            expected[row * side + column] = waves
    np.testing.assert_allclose(added(side, hidden_size), expected, rtol=0, atol=1e-6)


def test_learned_sincos_starts_as_sincos():
    learned, fixed = (
        Positions(kind, height=3, width=4, hidden_size=16, fill=normal(1.0), scale=0.5)
        for kind in ("learned_sincos", "sincos")
    )
    nothing = torch.zeros(1, 12, 16)
    assert torch.equal(learned(nothing, cells(3, 4)), fixed(nothing, cells(3, 4)))
    assert learned.weight.requires_grad


def test_sincos_matches_transformers_mae():
    from transformers.models.vit_mae.modeling_vit_mae import ViTMAEConfig, ViTMAEEmbeddings

    embeddings = ViTMAEEmbeddings(ViTMAEConfig(hidden_size=768, image_size=224, patch_size=16))
    embeddings.initialize_weights()
    # Row 0 belongs to the class token, which has no position.
    expected = embeddings.position_embeddings[0, 1:].detach()
    np.testing.assert_allclose(added(14, 768), expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("kind", "parameters", "carried", "adds"),
    [
        ("none", 0, {}, False),
        ("learned", 12 * 16, {}, True),
        ("sincos", 0, {}, True),
        ("rope_1d", 0, {"coordinates": 1}, False),
        ("rope_2d", 0, {"coordinates": 2}, False),
    ],
)
def test_each_kind_adds_embeddings_or_carries_coordinates(kind, parameters, carried, adds):
    positions = Positions(kind, height=3, width=4, hidden_size=16, fill=normal(0.5))
    places, hidden = cells(3, 4), draw(2, 12, 16)
    assert sum(p.numel() for p in positions.parameters()) == parameters
    assert {k: v.shape[-1] for k, v in positions.carried(places).items()} == carried
    assert torch.equal(positions(hidden, places), hidden) != adds
    # Permuting tokens and positions together permutes the result.
    order = torch.randperm(12, generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(
        positions(hidden[:, order], places[:, order]), positions(hidden, places)[:, order]
    )


def test_rope_1d_coordinates_are_raster_indices():
    positions = Positions("rope_1d", height=3, width=4, hidden_size=16, fill=normal(0.5))
    assert positions.carried(cells(3, 4))["coordinates"].flatten().tolist() == list(range(12))


@pytest.mark.parametrize("kind", ["rope_2d", "relative_2d"])
def test_coordinates_of_tokens_without_a_cell(kind):
    positions = Positions(kind, height=3, width=4, hidden_size=16, fill=normal(0.5))
    places = torch.tensor([[NOWHERE, START, 0, 6]])
    assert positions.carried(places)["coordinates"].tolist() == [
        [[-1, -1], [0, -1], [0, 0], [1, 2]]
    ]
