"""BatchNorm without affine parameters against torch.nn.BatchNorm1d."""

import torch

from megavis.model.norms import BatchNorm


def test_matches_torch_batch_norm(context):
    ours = BatchNorm(5, context.data.group)
    theirs = torch.nn.BatchNorm1d(5, affine=False, eps=1e-6)
    generator = torch.Generator().manual_seed(0)
    for _ in range(3):
        features = 3.0 * torch.randn(16, 5, generator=generator) + 2.0
        torch.testing.assert_close(ours(features), theirs(features))
    torch.testing.assert_close(
        (ours.mean, ours.variance), (theirs.running_mean, theirs.running_var)
    )
    features = torch.randn(4, 5, generator=generator)
    torch.testing.assert_close(ours.eval()(features), theirs.eval()(features))


def test_statistics_stay_in_float32(context):
    ours = BatchNorm(3, context.data.group).bfloat16()
    ours(torch.randn(8, 3).bfloat16())
    assert (ours.mean.dtype, ours.variance.dtype) == (torch.float32, torch.float32)
    assert list(ours.state_dict()) == ["mean", "variance"]
