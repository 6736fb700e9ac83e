"""Moments of latents against NumPy and against known differences."""

import numpy as np
import pytest
import torch

from megavis.evaluation.images.set_metrics import compare, moments_of

pytestmark = pytest.mark.once


def latents_of(count, *, shift=0.0, seed=0):
    """Return latents whose rows are AR(1) processes with neighbour correlation 0.6."""
    generator = torch.Generator().manual_seed(seed)
    columns = [torch.randn(count, 3, 6, generator=generator)]
    for _ in range(5):
        noise = torch.randn(count, 3, 6, generator=generator)
        columns.append(0.6 * columns[-1] + 0.8 * noise)
    return torch.stack(columns, dim=-1) * 2.0 + shift


def test_moments_match_numpy():
    latents = latents_of(50)
    moments = moments_of(latents)
    for channel in range(3):
        values = latents[:, channel].double().numpy()
        np.testing.assert_allclose(moments["mean"][channel], values.mean())
        np.testing.assert_allclose(moments["deviation"][channel], values.std(ddof=1))
        correlation = np.corrcoef(values[..., 1:].ravel(), values[..., :-1].ravel())[0, 1]
        np.testing.assert_allclose(moments["horizontal"][channel], correlation)


def test_compare_reports_known_differences():
    same = compare(latents_of(4000), latents_of(4000, seed=1))["largest_difference"]
    assert max(same.values()) < 0.03
    moved = compare(latents_of(4000, shift=1.0), latents_of(4000, seed=1))["largest_difference"]
    assert abs(moved["mean"] - 0.5) < 0.03
    wider = compare(1.5 * latents_of(4000), latents_of(4000, seed=1))["largest_difference"]
    assert abs(wider["deviation"] - 0.5) < 0.03
    turned = latents_of(4000).transpose(2, 3)
    other = compare(turned, latents_of(4000, seed=1))["largest_difference"]
    assert abs(other["horizontal"] - 0.6) < 0.05
    assert abs(other["vertical"] - 0.6) < 0.05
