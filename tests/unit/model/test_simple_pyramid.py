"""The simple pyramid against its equations, as detectron2's `SimpleFeaturePyramid` has them."""

import torch
import torch.nn.functional as F
from torch import nn

from megavis.model.dense import SimplePyramid

WIDTH, CHANNELS, GRID = 8, 6, 4


def up(grid, weight, bias):
    """Double the resolution: each cell becomes 2 × 2, by the four maps in `weight`."""
    count, _, height, width = grid.shape
    cells = torch.einsum("nihw,iokl->nohkwl", grid, weight)
    return cells.reshape(count, -1, 2 * height, 2 * width) + bias[:, None, None]


def normed(grid, gain, bias):
    """Normalise the channels of each cell (layer norm, ε = 1e-6)."""
    centred = grid - grid.mean(1, keepdim=True)
    scaled = centred / (centred.square().mean(1, keepdim=True) + 1e-6).sqrt()
    return scaled * gain[:, None, None] + bias[:, None, None]


def scaled(grid, number, weights):
    """Return the grid at 4, 2, 1 and 1/2 times its resolution, for levels 0 to 3."""
    if number == 0:
        grid = normed(up(grid, *weights[:2]), *weights[2:4])
        grid = 0.5 * grid * (1 + torch.erf(grid / 2**0.5))
        return up(grid, *weights[4:6]), weights[6:]
    if number == 1:
        return up(grid, *weights[:2]), weights[2:]
    if number == 3:
        grid = grid.unflatten(3, (-1, 2)).unflatten(2, (-1, 2)).amax((3, 5))
    return grid, weights


def reference(grid, levels):
    """Scale, 1 × 1 convolution, norm, 3 × 3 convolution, norm; the last level is every second."""
    found = []
    for number, level in enumerate(levels):
        own, weights = scaled(grid, number, list(level.parameters()))
        narrow, gain, bias, wide, last_gain, last_bias = weights
        own = normed(torch.einsum("nihw,oi->nohw", own, narrow[:, :, 0, 0]), gain, bias)
        patches = F.unfold(own, 3, padding=1).unflatten(2, own.shape[2:])
        own = torch.einsum("nphw,op->nohw", patches, wide.flatten(1))
        found.append(normed(own, last_gain, last_bias))
    return [*found, found[-1][..., ::2, ::2]]


def test_levels_equal_the_equations():
    torch.manual_seed(0)
    pyramid = SimplePyramid(WIDTH, CHANNELS).double()
    for parameter in pyramid.parameters():
        nn.init.normal_(parameter)
    grid = torch.randn(2, WIDTH, GRID, GRID, dtype=torch.float64)
    levels = pyramid(grid)
    # Strides of 4, 8, 16, 32 and 64 pixels for patches of 16.
    assert [level.shape[2] for level in levels] == [4 * GRID, 2 * GRID, GRID, GRID // 2, 1]
    for found, expected in zip(levels, reference(grid, pyramid.levels), strict=True):
        torch.testing.assert_close(found, expected)
