"""GPU kernels against plain PyTorch, as far as a CPU can run them.

`is_cuda` is patched to True, and functions that would be compiled run eagerly.
"""

import sys
import types

import pytest
import torch
import torch.nn.functional as F
from largest_tensor import LargestTensor
from torch.nn.attention import flex_attention as flex

from megavis.config.errors import UserError
from megavis.model import kernels
from megavis.model.activations import quick_gelu
from megavis.model.visibility import OncePerStep

pytestmark = pytest.mark.once


@pytest.fixture
def as_on_gpu(monkeypatch):
    """Use the fused kernels without torch.compile."""
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    monkeypatch.setattr(kernels, "compiled", lambda function: function)
    yield
    kernels.choose_kernels("auto")


def draw(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def groups_of(num, highest, *, batch, seed):
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randint(0, highest, (batch, num), generator=generator)
    return drawn.sort(dim=1).values


@pytest.mark.parametrize(
    ("queries", "keys", "batch"), [(300, 200, 2), (256, 128, 1), (130, 393, 2)]
)
def test_block_mask_matches_create_block_mask(queries, keys, batch):
    groups = groups_of(keys, 9, batch=batch, seed=1)
    reach = torch.cat([groups[:, : keys // 2] + 1, groups_of(queries, 9, batch=batch, seed=2)], 1)
    reach = reach[:, -queries:]
    found = kernels.group_blocks(groups, reach)

    def sees(b, _, row, column):
        return groups[b, column] < reach[b, row]

    wanted = flex.create_block_mask(sees, batch, None, reach.shape[1], keys, device="cpu")
    assert torch.equal(found.kv_num_blocks, wanted.kv_num_blocks)
    assert torch.equal(found.full_kv_num_blocks, wanted.full_kv_num_blocks)
    assert torch.equal(found.to_dense(), wanted.to_dense())
    assert int(found.kv_num_blocks.sum()) > 0


def test_group_blocks_is_not_quadratic_in_tokens():
    groups, reach = (groups_of(n, 9, batch=2, seed=n) for n in (1024, 2048))
    with LargestTensor() as largest:
        kernels.group_blocks(groups, reach)
    assert 0 < largest.size <= 8 * 2 * 2048


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_two_stream_attention_matches_masked_softmax(as_on_gpu, monkeypatch, dtype):
    # FlexAttention refuses gradients on a CPU although its eager form supports them.
    monkeypatch.setattr(flex, "_validate_device", lambda *_: None)
    groups = groups_of(140, 5, batch=2, seed=1)
    reach = groups_of(160, 6, batch=2, seed=2)
    reach[1, :3] = 0  # Rows that see no keys.
    inputs = [draw(2, 2, n, 16, seed=n).to(dtype) for n in (160, 140, 141)]
    inputs[2] = inputs[2][:, :, :140]
    slope = draw(2, 2, 160, 16, seed=9).to(dtype)

    def by_flex(query, key, value):
        blocks = kernels.group_blocks(groups, reach)
        return kernels.two_stream_attention(query, key, value, blocks)

    def plainly(query, key, value):
        scores = query.float() @ key.float().transpose(2, 3) / 4.0
        seen = (groups[:, None, :] < reach[:, :, None])[:, None]
        weights = scores.masked_fill(~seen, -1e30).softmax(-1) * seen
        return weights @ value.float()

    results = []
    for attend in (by_flex, plainly):
        own = [t.clone().requires_grad_() for t in inputs]
        mixed = attend(*own)
        mixed.backward(slope.to(mixed.dtype))
        results.append([mixed.float(), *(t.grad.float() for t in own)])
    tolerance = 1e-5 if dtype == torch.float32 else 3e-2
    for found, wanted in zip(*results, strict=True):
        torch.testing.assert_close(found, wanted, atol=tolerance, rtol=tolerance)
    assert results[0][0][1, :, :3].abs().max() == 0


@pytest.mark.parametrize(
    ("queries", "keys", "compiles"), [(1, 2, False), (2, 2, False), (5, 1, False), (2, 2, True)]
)
def test_attention_to_few_keys_matches_sdpa(queries, keys, compiles):
    plain = kernels.attend_to_few.__wrapped__
    attend = torch.compile(plain, fullgraph=True) if compiles else plain
    heads = [draw(6, 3, 2 * n, 8, seed=n)[:, :, ::2] for n in (queries, keys, keys + 10)]
    heads[2] = heads[2][:, :, :keys]
    for dtype, tolerance in ((torch.float32, 1e-5), (torch.bfloat16, 3e-2)):
        found = [*both(attend, F.scaled_dot_product_attention, *(t.to(dtype) for t in heads))]
        for ours, theirs in found:
            assert ours.dtype == dtype
            torch.testing.assert_close(ours, theirs, atol=tolerance, rtol=tolerance)


def both(function, plain, *inputs):
    """Return pairs of values and gradients of both functions."""
    results = []
    for compute in (function, plain):
        own = [t.clone().requires_grad_(t.is_floating_point()) for t in inputs]
        value = compute(*own)
        value.backward(draw(*value.shape, seed=5).to(value.dtype))
        results.append([value, *(t.grad for t in own if t.requires_grad)])
    return zip(*results, strict=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fused_norms_match_plain_norms(as_on_gpu, dtype):
    x, gain, shift = (
        draw(6, 3, 32).to(dtype),
        draw(32, seed=1).to(dtype),
        draw(32, seed=2).to(dtype),
    )
    # Gradients of gain and shift sum 18 rows, each rounded to bf16 on a CPU.
    tolerance = 1e-5 if dtype == torch.float32 else 18 * 2**-8
    pairs = [
        *both(
            lambda x, g, b: kernels.layer_norm(x, g, b, 1e-6),
            lambda x, g, b: torch.layer_norm(x.float(), (32,), g.float(), b.float(), 1e-6),
            *(x, gain, shift),
        ),
        *both(
            lambda x, g: kernels.rms_norm(x, g, 1e-6),
            lambda x, g: x.float() * (x.float().square().mean(-1, True) + 1e-6).rsqrt() * g.float(),
            *(x, gain),
        ),
    ]
    for found, wanted in pairs:
        assert found.dtype == dtype
        torch.testing.assert_close(found.float(), wanted.float(), atol=tolerance, rtol=tolerance)


def test_fused_quick_gelu_matches_plain(as_on_gpu, monkeypatch):
    x = draw(64, seed=3)
    fused = [*both(quick_gelu, quick_gelu, x)]
    monkeypatch.setattr(torch.Tensor, "is_cuda", False)
    for (found, _), (_, wanted) in zip(fused, both(quick_gelu, quick_gelu, x), strict=True):
        torch.testing.assert_close(found, wanted)


def test_compiled_rotation_matches_eager():
    angles = draw(1, 1, 6, 4, seed=1)
    cos, sin = angles.cos(), angles.sin()
    plain = kernels.apply_rotary.__wrapped__
    compiled = torch.compile(plain, fullgraph=True)
    for dtype, tolerance in ((torch.float32, 1e-6), (torch.bfloat16, 0.0)):
        heads = draw(2, 3, 6, 8).to(dtype)
        for found, wanted in both(
            lambda x: compiled(x, cos, sin), lambda x: plain(x, cos, sin), heads
        ):
            torch.testing.assert_close(found, wanted, atol=tolerance, rtol=tolerance)


def test_choose_kernels_applies_to_the_process(monkeypatch):
    x = torch.ones(1)
    assert not kernels.is_fused(x), "CPU tensors use the plain kernels"
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    assert kernels.is_fused(x)
    try:
        kernels.choose_kernels("torch")
        assert not kernels.is_fused(x)
    finally:
        kernels.choose_kernels("auto")


def test_apex_norms_are_used_where_installed(as_on_gpu, monkeypatch):
    monkeypatch.setitem(sys.modules, "apex.normalization", None)
    with pytest.raises(UserError, match="training.kernels: apex needs NVIDIA Apex"):
        kernels.choose_kernels("apex")
    calls = []
    stand_in = types.ModuleType("apex.normalization")
    stand_in.fused_layer_norm = types.SimpleNamespace(
        fused_rms_norm_affine=lambda x, gain, shape, eps: calls.append((shape, eps)) or x * gain,
        fused_layer_norm_affine=lambda x, gain, bias, shape, eps: x * gain + bias,
    )
    monkeypatch.setitem(sys.modules, "apex", types.ModuleType("apex"))
    monkeypatch.setitem(sys.modules, "apex.normalization", stand_in)
    kernels.choose_kernels("apex")
    x, gain = draw(2, 4), draw(4, seed=1)
    assert torch.equal(kernels.rms_norm(x, gain, 1e-3), x * gain)
    assert calls == [((4,), 1e-3)]
    assert torch.equal(kernels.layer_norm(x, gain, None, 1e-3), x * gain)


def test_once_per_step_recomputes_for_other_tensors():
    once, made = OncePerStep(), []
    first, second = torch.zeros(2), torch.zeros(2)

    def make():
        made.append(len(made))
        return made[-1]

    assert [once("a", make, first), once("a", make, first)] == [0, 0]
    assert once("b", make, first) == 1
    assert once("a", make, second) == 2
    second.add_(1.0)
    assert once("a", make, second) == 3
    assert once("a", make, second, first) == 4
