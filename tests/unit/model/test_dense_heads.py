"""The dense heads against BEiT's in `transformers`, with norms over channels in both."""

import pytest
import torch
from torch import nn

from megavis.model.dense import ChannelNorm, FCNHead, FeaturePyramid, UPerHead

pytestmark = pytest.mark.once

WIDTH, CLASSES = 12, 5


def with_channel_norms(module):
    """Replace the batch norms of a network by layer norms over channels."""
    for name, child in module.named_children():
        if isinstance(child, nn.BatchNorm2d):
            setattr(module, name, Reference(child.num_features))
        else:
            with_channel_norms(child)
    return module


class Reference(nn.Module):
    """A layer norm over channels, written out."""

    def __init__(self, width):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(width)), nn.Parameter(torch.zeros(width))

    def forward(self, grid):
        mean, variance = grid.mean(1, keepdim=True), grid.var(1, keepdim=True, correction=0)
        normed = (grid - mean) / (variance + 1e-5).sqrt()
        return normed * self.weight[:, None, None] + self.bias[:, None, None]


@pytest.fixture(scope="module")
def beit():
    from transformers import BeitConfig
    from transformers.models.beit import modeling_beit

    config = BeitConfig(
        hidden_size=WIDTH, num_labels=CLASSES, auxiliary_channels=8, auxiliary_num_convs=1
    )
    torch.manual_seed(0)
    heads = (
        modeling_beit.BeitFPNNeck(config),
        modeling_beit.BeitUperHead(config),
        modeling_beit.BeitFCNHead(config),
    )
    for head in heads:
        with_channel_norms(head)
        for parameter in head.parameters():
            nn.init.normal_(parameter, 0.1, 0.3)
    return heads


def copy(source, target):
    """Copy parameters in the order of their definition, which is the order of their use."""
    ours, theirs = list(target.parameters()), list(source.parameters())
    assert sorted(p.shape for p in ours) == sorted(p.shape for p in theirs)
    with torch.no_grad():
        for own, other in zip(ours, theirs, strict=True):
            own.copy_(other)


def by_use(head):
    """BEiT's head defines the classifier first; put it last, as it is used."""
    names = ["psp_modules", "psp_bottleneck", "lateral_convs", "fpn_convs", "fpn_bottleneck"]
    return nn.ModuleList([getattr(head, name) for name in (*names, "classifier")])


def test_heads_equal_beits(beit):
    neck, upper, auxiliary = beit
    pyramid = FeaturePyramid(WIDTH)
    copy(neck, pyramid)
    head = UPerHead(WIDTH, WIDTH, CLASSES, dropout=0.1).eval()
    copy(by_use(upper), head)
    below = FCNHead(WIDTH, 8, CLASSES, dropout=0.1).eval()
    copy(nn.ModuleList([auxiliary.convs, auxiliary.classifier]), below)
    random = torch.Generator().manual_seed(1)
    grids = [torch.randn(2, WIDTH, 6, 6, generator=random) for _ in range(4)]
    expected = neck(tuple(grids))
    levels = pyramid(grids)
    for own, other in zip(levels, expected, strict=True):
        torch.testing.assert_close(own, other)
    torch.testing.assert_close(head(levels), upper(list(expected)), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(below(levels[2]), auxiliary(list(expected)), rtol=1e-4, atol=1e-5)


def test_norm_is_over_channels():
    grid = torch.randn(2, 7, 3, 4, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(ChannelNorm(7)(grid), Reference(7)(grid))


def test_an_image_s_logits_do_not_depend_on_the_others():
    torch.manual_seed(0)
    pyramid, head = FeaturePyramid(8), UPerHead(8, 6, 3, dropout=0.0)
    grids = [torch.randn(3, 8, 4, 4) for _ in range(4)]
    whole = head(pyramid(grids))
    alone = head(pyramid([grid[1:2] for grid in grids]))
    torch.testing.assert_close(whole[1:2], alone, rtol=1e-5, atol=1e-6)
