"""BatchNorm without affine parameters against torch.nn.BatchNorm1d."""

import pytest
import torch

from megavis.model.inference import Inference
from megavis.model.norms import BatchNorm
from megavis.model.stack import LocalLayers


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


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_statistics_stay_in_float32(context, dtype):
    ours = BatchNorm(3, context.data.group)
    ours(1000 * torch.randn(8, 3))
    before = [value.clone() for value in ours.buffers()]
    for value, wanted in zip(ours.to(dtype).buffers(), before, strict=True):
        assert value.dtype == torch.float32
        assert torch.equal(value, wanted)
    ours(torch.randn(8, 3).to(dtype))
    assert (ours.mean.dtype, ours.variance.dtype) == (torch.float32, torch.float32)
    assert list(ours.state_dict()) == ["mean", "variance"]
    assert ours.to("meta", dtype).mean.dtype == torch.float32


def test_inference_returns_each_module_to_its_own_mode(context):
    layer = torch.nn.Sequential(BatchNorm(3, context.data.group), torch.nn.Dropout())
    layer[0].eval()
    inference = Inference(LocalLayers([], [layer]), context)
    for _ in range(2):
        with inference.evaluating():
            assert not any(module.training for module in layer.modules())
        assert [module.training for module in layer.modules()] == [True, False, True]
