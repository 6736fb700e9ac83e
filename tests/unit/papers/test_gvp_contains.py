"""Special cases of GVP (section 3.3): iGPT, XLNet and masked modelling.

With one token per group GVP is autoregressive (iGPT in raster order, XLNet in any order); with one
predicted group it is masked modelling.
"""

import pytest
import torch
from torch.nn import functional as F

from megavis.model.core import Block
from megavis.model.layer_state import LayerState
from megavis.schedules.schedule import Arrangement, PredictionTargets
from megavis.schedules.segmented import groups_of

PATCHES, WIDTH, HEADS = 9, 16, 2
EACH_ITS_OWN = tuple(range(PATCHES))
"""n_0 .. n_{K-1} with no given tokens and one token per group."""


@pytest.fixture
def streams(build_gvp):
    """Run both streams on random patches; return hidden states before and after the blocks."""
    objective, inference = build_gvp("objective.num_condition_tokens=0", "model.positions=none")
    embedding, *blocks, _ = inference.layers.modules

    def run(order, boundaries, seen=PATCHES, asked=slice(None)):
        z = torch.tensor([order])
        groups = groups_of(torch.tensor([boundaries]), PATCHES)
        patches = torch.randn(1, PATCHES, 48, generator=torch.Generator().manual_seed(2))
        plan = Arrangement(z, groups, num_content=seen)
        state = embedding(
            objective.asks.rows(patches[:, z[0]], PredictionTargets(plan, seen, asked))
        )
        before = LayerState.unpack(state, objective.carried_names).hidden
        for block in blocks:
            state = block(state)
        return before, LayerState.unpack(state, objective.carried_names).hidden

    return objective.core, blocks, run


def through(core, blocks, kind, hidden, **carried):
    """Run blocks of the same weights with another visibility."""
    other = core.with_stack(visibility_kind=kind, carried_names=tuple(carried))
    state = LayerState(hidden, carried).pack()
    for number, block in enumerate(blocks, start=1):
        twin = Block(other, number)
        twin.load_state_dict(block.state_dict())
        state = twin(state)
    return LayerState.unpack(state, other.carried_names).hidden


def test_one_token_groups_in_raster_order_equal_igpt(streams):
    core, blocks, run = streams
    before, after = run(range(PATCHES), EACH_ITS_OWN, asked=slice(0, 0))
    torch.testing.assert_close(after, through(core, blocks, "causal", before))


def test_one_predicted_group_equals_masked_modelling(streams):
    """Given tokens see one another; a query sees the given tokens only."""
    core, blocks, run = streams
    order, given = [4, 0, 7, 2, 8, 1, 6, 3, 5], 4
    before, queries = run(order, (given,), seen=given, asked=slice(given, None))
    # In MP3's visibility all tokens attend to the context, here the given tokens.
    context = torch.arange(given)[None]
    after = through(core, blocks, "context", before, context=context)
    torch.testing.assert_close(queries, after[given:])
    before, content = run(order, (given,), seen=given, asked=slice(0, 0))
    torch.testing.assert_close(content, through(core, blocks, "full", before))


def test_one_token_groups_in_any_order_equal_xlnet(streams):
    """g_{z_t} = Attention(g_{z_t}; h_{z_<t}) and h_{z_t} = Attention(h_{z_t}; h_{z_<=t}).

    "XLNet: Generalized Autoregressive Pretraining for Language Understanding", section 2.3, token
    by token in a pre-norm block.
    """
    _, blocks, run = streams
    before, queries = run([4, 0, 7, 2, 8, 1, 6, 3, 5], EACH_ITS_OWN)
    content, query = before[:PATCHES, 0], before[PATCHES:, 0]
    for block in blocks:
        weights = dict(block.named_parameters())
        query = torch.stack([token(weights, query[t], content[:t]) for t in range(PATCHES)])
        content = torch.stack(
            [token(weights, content[t], content[: t + 1]) for t in range(PATCHES)]
        )
    torch.testing.assert_close(queries[:, 0], query, rtol=1e-4, atol=1e-4)


def token(weights, own, seen):
    """Apply a block to one token `[h]` that attends to `seen` `[c, h]`; c may be 0."""

    def norm(x, name):
        return F.layer_norm(x, (WIDTH,), weights[f"{name}.weight"], weights[f"{name}.bias"], 1e-6)

    def linear(x, name):
        return F.linear(x, weights[f"{name}.weight"], weights[f"{name}.bias"])

    def heads(x):
        joined = linear(norm(x, "input_layernorm"), "self_attention.linear_qkv")
        # A head's queries precede its keys, and these its values.
        return joined.unflatten(-1, (HEADS, 3, WIDTH // HEADS)).unbind(-2)

    query, (_, key, value) = heads(own)[0], heads(seen)
    mixed = torch.zeros(HEADS, WIDTH // HEADS)
    if len(seen):
        scores = torch.einsum("nd,cnd->nc", query, key) / (WIDTH // HEADS) ** 0.5
        mixed = torch.einsum("nc,cnd->nd", scores.softmax(-1), value)
    own = own + linear(mixed.flatten(), "self_attention.linear_proj")
    inner = F.gelu(linear(norm(own, "pre_mlp_layernorm"), "mlp.linear_fc1"))
    return own + linear(inner, "mlp.linear_fc2")
