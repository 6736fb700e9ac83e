"""No tokens × tokens attention matrix is materialized in the forward or backward pass."""

import pytest
import torch
from largest_tensor import LargestTensor
from small_batches import run_layers

IMAGE_SIZE = 24
NUM_TOKENS = IMAGE_SIZE**2


def step_of(objective, inference):
    """Run one image forward and backward."""
    ids = torch.randint(32, (1, NUM_TOKENS))
    inputs = objective.inputs_from(ids, sample_index=torch.arange(1))
    run_layers(inference.layers.modules, inputs).sum().backward()


@pytest.mark.parametrize("mode", ["autoregressive", "bert"])
def test_no_tensor_is_quadratic_in_tokens(build, tmp_path, mode):
    words = [f"data.image_size={IMAGE_SIZE}", f"objective.mode={mode}"]
    objective, inference = build(tmp_path / "c.yaml", *words)
    with LargestTensor() as largest:
        step_of(objective, inference)
    # The largest legitimate tensor holds 4 · hidden_size values per token, or one logit per colour.
    assert largest.size >= 4 * NUM_TOKENS * 64
    assert largest.size < NUM_TOKENS**2, f"{largest.operation}: {largest.size} bytes"


def test_largest_tensor_detects_an_attention_matrix():
    query = torch.randn(1, 2, NUM_TOKENS, 8, requires_grad=True)
    with LargestTensor() as largest:
        (query @ query.transpose(2, 3)).softmax(-1).sum().backward()
    assert largest.size >= 4 * 2 * NUM_TOKENS**2
