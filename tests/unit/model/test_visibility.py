"""Visibility masks against their definition, and attention against a masked softmax."""

import math

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from megavis.model import attention as attention_module
from megavis.model import kernels
from megavis.model.attention import Attention
from megavis.model.core import megatron_config
from megavis.model.parameters import Initialization, normal
from megavis.model.visibility import AttentionContext, KeyValueCache, Visibility

IMAGES, TOKENS, WIDTH, HEADS = 2, 7, 16, 2


def draw(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def visibilities():
    content = torch.tensor([[0, 1, 1, 2], [1, 1, 2, 3]])
    query = torch.tensor([[1, 1, 2], [1, 2, 3]])
    return {
        "causal": Visibility("causal"),
        "full": Visibility("full"),
        # In the second image the first query group sees nothing at all.
        "two_stream": Visibility("two_stream", content_groups=content, query_groups=query),
        "context": Visibility("context", context=torch.tensor([[5, 0, 3], [1, 2, 6]])),
    }


def sees(visibility, image, i, j):
    """Evaluate the table in the module's docstring for one pair of tokens."""
    if visibility.kind == "causal":
        return j <= i
    if visibility.kind == "full":
        return True
    if visibility.kind == "context":
        return j in visibility.context[image].tolist()
    content, query = visibility.content_groups[image], visibility.query_groups[image]
    if j >= len(content):
        return False
    if i < len(content):
        return bool(content[j] <= content[i])
    return bool(content[j] < query[i - len(content)])


def by_definition(visibility):
    return torch.tensor(
        [
            [[sees(visibility, b, i, j) for j in range(TOKENS)] for i in range(TOKENS)]
            for b in range(IMAGES)
        ]
    )


@pytest.fixture
def attention(build, tmp_path):
    """Build attention of any visibility kind with the same weights."""
    objective, _ = build(tmp_path / "c.yaml")
    config = megatron_config(objective.config, objective.core.groups, objective.core.stack)

    def make(kind):
        torch.manual_seed(0)
        # Keep q and k near 1: larger values amplify softmax rounding in the gradients.
        fill = normal(0.25)
        initialization = Initialization(fill, fill, fill, fill, fill)
        return Attention(config, objective.core.groups, initialization, kind)

    return make


def turned(heads, coordinates):
    """Rotate channels as complex numbers, z · e^(i m θ), half of them per axis."""
    frequencies = 10_000.0 ** (-torch.arange(0, 4, 2, dtype=torch.float64) / 4)
    angles = (coordinates[..., None] * frequencies).flatten(-2)[:, None]
    z = torch.view_as_complex(heads.unflatten(-1, (-1, 2)).contiguous())
    return torch.view_as_real(z * torch.polar(torch.ones_like(angles), angles)).flatten(-2)


def plain_attention(module, hidden, mask, coordinates=None):
    """softmax(q · k / √d) under `mask` `[b, s, s]` in float64; zeros for fully masked rows."""
    size = WIDTH // HEADS
    qkv, proj = (layer.weight.double() for layer in (module.linear_qkv, module.linear_proj))
    batch_first = hidden.transpose(0, 1)
    # A head's queries precede its keys, and these its values.
    heads = (batch_first @ qkv.T).unflatten(-1, (HEADS, 3, size))
    query, key, value = (heads[..., part, :].transpose(1, 2) for part in range(3))
    if coordinates is not None:
        query, key = turned(query, coordinates), turned(key, coordinates)
    scores = query @ key.transpose(2, 3) / math.sqrt(size)
    # A fully masked row has no softmax: unmask it here and zero its shares below.
    shown = mask[:, None] | ~mask.any(-1)[:, None, :, None]
    shares = scores.masked_fill(~shown, -math.inf).softmax(-1) * mask[:, None]
    return (shares @ value).transpose(1, 2).flatten(2).transpose(0, 1) @ proj.T


@pytest.mark.parametrize("rotary", [False, True])
@pytest.mark.parametrize("kind", list(visibilities()))
def test_attention_and_gradient_match_masked_softmax(attention, kind, rotary):
    module, visibility = attention(kind), visibilities()[kind]
    coordinates = torch.randint(0, 9, (IMAGES, TOKENS, 2)) if rotary else None
    results = []
    for dtype, compute in (
        (torch.float32, lambda x: module(x, AttentionContext(visibility, coordinates))[0]),
        (
            torch.float64,
            lambda x: plain_attention(module, x, by_definition(visibility), coordinates),
        ),
    ):
        hidden = draw(TOKENS, IMAGES, WIDTH).to(dtype).requires_grad_()
        out = compute(hidden)
        out.pow(2).sum().backward()
        results.append((out.detach(), hidden.grad))
    for ours, plain in zip(*results, strict=True):
        torch.testing.assert_close(ours.double(), plain, rtol=1e-5, atol=1e-5)


def test_query_start_skips_unused_projections(attention):
    module, visibility = attention("two_stream"), visibilities()["two_stream"]
    hidden, lengths = draw(TOKENS, IMAGES, WIDTH), []
    module.linear_qkv.register_forward_hook(
        lambda _, inputs, __: lengths.append([len(rows) for rows in inputs])
    )
    whole = module(hidden, AttentionContext(visibility))[0]
    part = module(hidden, AttentionContext(visibility, query_start=visibility.query_start))[0]
    assert lengths == [[7, 4], [3, 4]]
    torch.testing.assert_close(part, whole[4:])


def test_masked_tokens_get_zero_gradient(attention):
    module, visibility = attention("two_stream"), visibilities()["two_stream"]
    expected = by_definition(visibility)
    for i in range(TOKENS):
        hidden = draw(TOKENS, IMAGES, WIDTH).requires_grad_()
        module(hidden, AttentionContext(visibility))[0][i].sum().backward()
        moved = hidden.grad.abs().sum(-1).t() > 0
        for image in range(IMAGES):
            seen = expected[image, i].clone()
            # A token's own query affects the output only if it sees more than one key.
            seen[i] |= seen.sum() > 1
            if seen.sum() == 1:
                continue
            assert moved[image].tolist() == seen.tolist()


def test_both_passes_of_a_checkpoint_use_flex_attention(attention, monkeypatch):
    module, visibility = attention("two_stream"), visibilities()["two_stream"]
    learns = []

    def like_flex(query, key, value, blocks):
        learns.append(torch.is_grad_enabled())
        return query

    monkeypatch.setattr(kernels, "is_fused", lambda _: True)
    monkeypatch.setattr(kernels, "BLOCK", 1)
    monkeypatch.setattr(kernels, "_SMALLEST_HEAD", 1)
    monkeypatch.setattr(attention_module, "two_stream_attention", like_flex)
    hidden = draw(TOKENS, IMAGES, WIDTH).requires_grad_()
    context = AttentionContext(visibility)
    checkpoint(module, hidden, context, use_reentrant=True)[0].sum().backward()
    assert learns == [False, True]
    with torch.no_grad():
        module.eval()(hidden, AttentionContext(visibility))
    assert len(learns) == 2, "not in evaluation"


@pytest.mark.parametrize("num_new", [1, 3])
def test_attention_with_cache_matches_full_pass(attention, num_new):
    module, coordinates = attention("causal"), torch.arange(TOKENS)[None, :, None]
    hidden, cache, parts = draw(TOKENS, IMAGES, WIDTH), KeyValueCache(TOKENS), []
    whole = module(hidden, AttentionContext(Visibility("causal"), coordinates))[0]
    for start in range(0, TOKENS, num_new):
        new = slice(start, start + num_new)
        attention_context = AttentionContext(Visibility("causal"), coordinates[:, new], cache)
        parts.append(module(hidden[new], attention_context)[0])
        cache.advance()
    torch.testing.assert_close(torch.cat(parts), whole, rtol=1e-5, atol=1e-5)
