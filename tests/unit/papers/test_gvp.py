"""Visibility of GVP's two streams against the paper's equations."""

import random

import pytest
import torch

from megavis.model.layer_state import LayerState
from megavis.model.visibility import Visibility
from megavis.schedules.schedule import Arrangement, PredictionTargets
from megavis.schedules.segmented import groups_of

SIDE, PATCHES = 3, 9


def by_equations(num_tokens, condition, order, boundaries):
    """Return M_h^z and M_g^z of equations (9) to (12), true where they are 0.

    Indices count from 1 as in the paper: order z_1 .. z_T, boundaries n_0 .. n_{K-1}. The last line
    of (11) prints f(j - S) on both sides for M_g; one of them is read as f(i - S).
    """
    size, first = condition + num_tokens, condition + boundaries[0]  # S + m - 1

    def group(t):
        return sum(n < t for n in boundaries)

    def sees(i, j, *, own):
        if j <= first:
            return True
        if i <= first:
            return False
        ours, theirs = group(i - condition), group(j - condition)
        return ours >= theirs if own else ours > theirs

    place = {i: i for i in range(1, condition + 1)}  # z'(i)
    place |= {z + condition: i + condition for i, z in enumerate(order, start=1)}
    rows = range(1, size + 1)
    return tuple(
        torch.tensor([[sees(place[i], place[j], own=own) for j in rows] for i in rows])
        for own in (True, False)
    )


def by_megavis(embedding, num_tokens, condition, order, boundaries):
    """Return the same masks from the state that the first layer passes to the blocks."""
    z = torch.tensor([order]) - 1
    groups = groups_of(torch.tensor([boundaries]), num_tokens)
    patches = torch.zeros(1, num_tokens, 48)
    plan = Arrangement(z, groups, num_content=num_tokens)
    rows = embedding.asking.rows(patches, PredictionTargets(plan, num_tokens, slice(0, num_tokens)))
    stream = LayerState.unpack(embedding(rows), ("content_groups", "query_groups"))
    visibility = Visibility("two_stream", **stream.carried)
    mask = visibility.mask(len(stream.hidden), visibility.num_content)[0]
    places = z[0].argsort() + condition  # places of the tokens of raster order
    content = torch.cat([torch.arange(condition), places])
    return mask[content][:, content], mask[places + num_tokens][:, content]


def draw_case(source):
    num_tokens, condition = source.randint(1, PATCHES), source.randint(0, 3)
    order = source.sample(range(1, num_tokens + 1), num_tokens)
    num_groups = source.randint(1, num_tokens)
    boundaries = sorted(source.sample(range(num_tokens), num_groups))
    return num_tokens, condition, order, boundaries


def test_visibility_matches_equations(build_gvp):
    embeddings = {}
    for condition in range(4):
        words = [f"objective.num_condition_tokens={condition}", "model.positions=none"]
        _, inference = build_gvp(*words)
        embeddings[condition] = inference.layers.modules[0]
    source = random.Random(0)
    for _ in range(500):
        case = draw_case(source)
        content, query = by_equations(*case)
        ours = by_megavis(embeddings[case[1]], *case)
        assert torch.equal(ours[0], content), case
        # Condition tokens have no queries, since no loss reads them.
        assert torch.equal(ours[1], query[case[1] :]), case


def test_reference_masks_match_appendix_a():
    # S = 2, z = [2, 3, 4, 5, 1], G_0 = [x_2], G_1 = [x_3, x_4], G_2 = [x_5, x_1]: equation (19).
    content, query = by_equations(5, 2, [2, 3, 4, 5, 1], [1, 3])
    condition, middle, last = "1101000", "1101110", "1111111"
    rows = [condition, condition, last, condition, middle, middle, last]
    assert ["".join(str(int(x)) for x in row) for row in content] == rows
    rows = [condition, condition, middle, condition, condition, condition, middle]
    assert ["".join(str(int(x)) for x in row) for row in query] == rows


@pytest.mark.parametrize("seed", range(6))
def test_gradients_match_visibility(build_gvp, seed):
    source = random.Random(seed)
    num_tokens, condition, order, boundaries = draw_case(source)
    objective, inference = build_gvp(f"objective.num_condition_tokens={condition}")
    embedding, *blocks, _ = inference.layers.modules
    seen_by = by_megavis(embedding, num_tokens, condition, order, boundaries)
    z = torch.tensor([order]) - 1
    groups = groups_of(torch.tensor([boundaries]), num_tokens)
    plan = Arrangement(z, groups, num_content=num_tokens)
    patches = torch.randn(1, num_tokens, 48)
    inputs = objective.asks.rows(patches, PredictionTargets(plan, num_tokens, slice(0, num_tokens)))
    stream = LayerState.unpack(embedding(inputs), objective.carried_names)
    hidden = stream.hidden.detach().requires_grad_()
    state = stream.with_hidden(hidden).pack()
    places = z[0].argsort() + condition
    content = torch.cat([torch.arange(condition), places])
    for number, block in enumerate(blocks):
        state = block(state)
        out = LayerState.unpack(state, objective.carried_names).hidden
        first = condition + num_tokens if number == len(blocks) - 1 else 0
        assert len(out) == len(hidden) - first, "the last block must return queries only"
        for row, token in [*enumerate(content), *enumerate(places + num_tokens, condition)]:
            if token < first:
                continue
            weights = torch.randn(16, generator=torch.Generator().manual_seed(row))
            (gradient,) = torch.autograd.grad(
                (out[token - first, 0] * weights).sum(), hidden, retain_graph=True
            )
            moved = gradient[:, 0].abs().sum(-1) > 0
            is_query = token >= condition + num_tokens
            expected = torch.zeros(len(hidden), dtype=torch.bool)
            expected[content] = seen_by[1][row - condition] if is_query else seen_by[0][row]
            expected[token] = True  # the residual
            assert torch.equal(moved, expected), (number, token)
