"""Activations of our own against their formulas."""

import pytest
import torch
import torch.nn.functional as F

from megavis.model.activations import quick_gelu, swiglu

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


def test_swiglu_gates_one_product_with_another():
    """Equation 6 of "GLU Variants Improve Transformer", whose Swish has β = 1."""
    generator = torch.Generator().manual_seed(0)
    x, gates, values = (
        torch.randn(size, dtype=torch.float64, generator=generator)
        for size in ((3, 7, 5), (4, 5), (4, 5))
    )
    gate = x @ gates.T
    wanted = gate / (1 + torch.exp(-gate)) * (x @ values.T)
    joined = torch.stack([gates, values], dim=1).flatten(0, 1).requires_grad_()
    assert torch.allclose(swiglu(F.linear(x, joined)), wanted, atol=1e-12)
    assert torch.autograd.gradcheck(lambda weight: swiglu(F.linear(x, weight)), joined)
