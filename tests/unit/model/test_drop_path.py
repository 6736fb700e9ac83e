"""Stochastic depth: an image goes through half a block as it is, or past it."""

import pytest
import torch
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add

from megavis.model.residual import add_to_residual, drop_path_of


def test_an_image_takes_the_branch_or_skips_it():
    torch.manual_seed(0)
    residual, branch, bias = torch.randn(5, 4000, 3), torch.randn(5, 4000, 3), torch.randn(3)
    added = add_to_residual(dropout=0.0, drop_path=0.25)(True, False)((branch, bias), residual, 0.0)
    kept = ((added - residual) - (branch + bias) / 0.75).abs().amax(dim=(0, 2)) < 1e-5
    skipped = (added == residual).all(dim=2).all(dim=0)
    assert torch.equal(kept, ~skipped)
    # Five standard deviations of a mean of 4,000 draws with probability 1/4.
    assert abs(skipped.float().mean().item() - 0.25) < 5 * (0.25 * 0.75 / 4000) ** 0.5


@pytest.mark.parametrize(("rate", "training"), [(0.5, False), (0.0, True)])
def test_outside_of_training_and_in_the_first_block_nothing_is_skipped(rate, training):
    branch, residual = torch.randn(5, 4, 3), torch.randn(5, 4, 3)
    plain = get_bias_dropout_add(training, False)((branch, None), residual, 0.0)
    add = add_to_residual(dropout=0.0, drop_path=rate)(training, False)
    assert torch.equal(add((branch, None), residual, 0.0), plain)
    assert [drop_path_of(number, 3, 0.2) for number in (1, 2, 3)] == [0.0, 0.1, 0.2]
