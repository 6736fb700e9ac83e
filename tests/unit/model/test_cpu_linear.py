"""The product of a linear layer is the same by either library, forward and backward."""

import pytest
import torch
import torch.nn.functional as F

from megavis.model import cpu_linear as module
from megavis.model.cpu_linear import SMALLEST, SMALLEST_PACKED, PackedLinear, product

pytestmark = pytest.mark.once
available = pytest.mark.skipif(
    not module._available, reason="this torch was built without oneDNN: there is one library"
)


def is_onednn(result: torch.Tensor) -> bool:
    """Tell by the graph which way a result was made: rows come first, then their shape."""
    return type(result.grad_fn.next_functions[0][0]).__name__ == "_ProductBackward"


@available
@pytest.mark.parametrize(("bias", "num_outputs"), [(True, 160), (False, 96)])
def test_values_and_gradients_are_those_in_double_precision(bias, num_outputs):
    torch.manual_seed(0)
    # A view as attention gives it, not contiguous.
    inputs = torch.randn(48, 96, 130).transpose(0, 1)[..., 1:129]
    weight, shift = torch.randn(num_outputs, 128), torch.randn(num_outputs) if bias else None
    given = [tensor for tensor in (inputs, weight, shift) if tensor is not None]
    gradient = torch.randn(96, 48, num_outputs)
    narrow = [tensor.detach().requires_grad_() for tensor in given]
    wide = [tensor.detach().double().requires_grad_() for tensor in given]
    ours, reference = product(*narrow), F.linear(*wide)
    assert is_onednn(ours)
    assert torch.allclose(ours.double(), reference, atol=1e-4)
    found = torch.autograd.grad(ours, narrow, gradient)
    expected = torch.autograd.grad(reference, wide, gradient.double())
    for one, other in zip(found, expected, strict=True):
        assert (one - other).norm() < 1e-6 * other.norm()


@available
def test_a_frozen_weight_gets_no_gradient():
    inputs = torch.randn(256, 128, requires_grad=True)
    product(inputs, torch.ones(128, 128)).sum().backward()
    assert torch.allclose(inputs.grad, torch.full_like(inputs, 128.0))


class Exponential(torch.autograd.Function):
    """Written over its input, as Megatron's cross-entropy writes the softmax over the logits."""

    @staticmethod
    def forward(ctx, logits):
        torch.exp(logits, out=logits)
        ctx.save_for_backward(logits)
        return logits.sum(-1)

    @staticmethod
    def backward(ctx, gradient):
        (exponential,) = ctx.saved_tensors
        return exponential * gradient[..., None]


@available
def test_what_comes_out_may_be_written_over():
    torch.manual_seed(0)
    inputs, weight = torch.randn(64, 32, 128), (torch.randn(160, 128) / 128).requires_grad_()
    logits = product(inputs, weight)
    assert is_onednn(logits)
    (found,) = torch.autograd.grad(Exponential.apply(logits).sum(), weight)
    (expected,) = torch.autograd.grad(F.linear(inputs, weight).exp().sum(), weight)
    assert (found - expected).norm() < 1e-6 * expected.norm()


@pytest.mark.parametrize(
    ("rows", "dtype", "expected"),
    [
        (SMALLEST // 64**2, torch.float32, module._available),
        (SMALLEST // 64**2 - 1, torch.float32, False),
        (SMALLEST // 64**2, torch.bfloat16, False),
    ],
)
def test_small_products_and_other_precisions_stay_with_torch(rows, dtype, expected):
    weight = torch.ones(64, 64, dtype=dtype, requires_grad=True)
    assert is_onednn(product(torch.ones(rows, 64, dtype=dtype), weight)) == expected


@pytest.mark.parametrize("num_rows", [1, SMALLEST_PACKED // 96 // 128 + 1])
@pytest.mark.parametrize("bias", [True, False])
def test_a_packed_weight_gives_the_product_in_double_precision(num_rows, bias):
    torch.manual_seed(0)
    inputs, weight = torch.randn(num_rows, 128), torch.randn(128, 96).t()
    shift = torch.randn(96) if bias else None
    linear = PackedLinear(weight, shift, num_rows=num_rows)
    assert linear._is_packed == (module._available and num_rows > 1)
    expected = F.linear(*(t if t is None else t.double() for t in (inputs, weight, shift)))
    assert (linear(inputs) - expected).norm() < 1e-6 * expected.norm()
