"""Quick GELU (iGPT's activation) against its formula."""

import pytest
import torch

from megavis.model.activations import quick_gelu

pytestmark = pytest.mark.once


def test_quick_gelu_value_and_gradient():
    torch.manual_seed(0)
    x = torch.randn(7, 33, dtype=torch.float64, requires_grad=True) * 4.0
    assert torch.allclose(quick_gelu(x), x / (1.0 + torch.exp(-1.702 * x)), atol=1e-12)
    assert torch.autograd.gradcheck(quick_gelu, x)


def test_quick_gelu_does_not_modify_its_input():
    x = torch.ones(3)
    quick_gelu(x)
    assert torch.equal(x, torch.ones(3))
