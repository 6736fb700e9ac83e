"""GIVT's adapter: released activations, invertibility and volume preservation."""

import copy

import pytest
import torch
from golden_givt import GOLDEN, golden

from megavis.model.adapter import Adapter
from megavis.weights.flax_layers import adapter_rows
from megavis.weights.released import read_arrays
from megavis.weights.tables import read_table


@pytest.fixture(scope="module")
def released():
    adapter = Adapter(16)
    tensors = read_arrays(GOLDEN / "adapter.npz")
    adapter.load_state_dict(read_table(adapter_rows(tensors), tensors))
    arrays = golden("adapter")
    values = [torch.tensor(arrays[name]).permute(0, 3, 1, 2) for name in ("z", "y")]
    return adapter.requires_grad_(False), *values


def test_parameter_count_matches_the_paper():
    assert sum(p.numel() for p in Adapter(16).parameters()) == 111_728


def test_released_weights_reproduce_released_activations(released):
    adapter, latents, adapted = released
    torch.testing.assert_close(adapter(latents), adapted, rtol=0, atol=1e-4)


def test_inverse_is_exact(released):
    adapter, latents, adapted = released
    torch.testing.assert_close(adapter.inverse(adapted), latents, rtol=0, atol=1e-4)


def test_inverse_is_exact_with_weights_in_bf16(released):
    """The coupling adds in float32, so the inverse subtracts exactly what was added."""
    adapter, latents, _ = released
    rounded = copy.deepcopy(adapter).bfloat16()
    adapted = rounded(latents)
    torch.testing.assert_close(rounded.inverse(adapted), latents, rtol=0, atol=1e-4)
    assert not torch.equal(adapted, adapter(latents))


def test_adapter_preserves_volume():
    adapter = Adapter(4, num_blocks=3, bottleneck=8).double()
    latents = torch.randn(1, 4, 2, 2, dtype=torch.float64)
    jacobian = torch.autograd.functional.jacobian(adapter, latents).reshape(16, 16)
    assert float(torch.linalg.det(jacobian).abs()) == pytest.approx(1.0, abs=1e-9)


def test_odd_number_of_channels_raises():
    with pytest.raises(ValueError, match="do not divide"):
        Adapter(5)
