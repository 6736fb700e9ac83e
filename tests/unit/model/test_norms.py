"""Norms against their formulas; statistics are computed in float32 for any input dtype."""

import pytest
import torch
from megatron.core.transformer import TransformerConfig

from megavis.model.norms import Norm, rms_norm


def make(kind, width=8):
    config = TransformerConfig(
        num_layers=1, hidden_size=width, num_attention_heads=1, normalization=kind
    )
    norm = Norm(config, width, 1e-5)
    with torch.no_grad():
        for parameter in norm.parameters():
            parameter.normal_(generator=torch.Generator().manual_seed(1))
    return norm


@pytest.mark.parametrize("kind", ["RMSNorm", "LayerNorm"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_norm_matches_formula(kind, dtype):
    norm = make(kind)
    x = torch.randn(5, 3, 8, generator=torch.Generator().manual_seed(2)).to(dtype)
    wide = x.double()
    if kind == "LayerNorm":
        wide = wide - wide.mean(-1, keepdim=True)
    expected = wide / (wide.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * norm.weight.double()
    if kind == "LayerNorm":
        expected = expected + norm.bias.double()
    out = norm(x)
    assert out.dtype == dtype
    tolerance = 1e-5 if dtype == torch.float32 else 2**-7
    torch.testing.assert_close(out.double(), expected, rtol=tolerance, atol=tolerance)


def test_rms_norm_gradient():
    x, gain = torch.randn(4, 2, 6, dtype=torch.float64), torch.randn(6, dtype=torch.float64)
    inputs = (x.requires_grad_(), gain.requires_grad_())
    assert torch.autograd.gradcheck(lambda x, gain: rms_norm(x, gain, 1e-2), inputs)
