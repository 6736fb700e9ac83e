"""iGPT's training layers: logits against plain loops, causality, initialization and FLOPs."""

import plain_igpt
import pytest
import torch
from small_batches import run_layers
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from megavis.model.core import Block
from megavis.model.flops import forward_flops
from megavis.model.visibility import KeyValueCache


def parameters_of(inference):
    return {name: p.detach().double() for name, p in inference.layers.named_parameters()}


def draw_ids(batch_size=2, num_tokens=16, vocabulary=32):
    return torch.randint(vocabulary, (batch_size, num_tokens), generator=torch.Generator())


@pytest.mark.parametrize("mode", ["autoregressive", "bert"])
def test_logits_match_plain_loops(build, tmp_path, mode):
    objective, inference = build(tmp_path / "c.yaml", f"objective.mode={mode}")
    ids = draw_ids()
    mask = torch.rand(ids.shape, generator=torch.Generator().manual_seed(1)) < 0.3
    conditions = {"mask": mask} if mode == "bert" else {}
    ours = objective.outputs(inference.predictions(objective.inputs_from(ids, **conditions)))
    for image in range(len(ids)):
        plain = plain_igpt.logits(
            parameters_of(inference),
            ids[image],
            num_layers=2,
            num_heads=2,
            causal=mode == "autoregressive",
            mask=mask[image] if mode == "bert" else None,
        )
        torch.testing.assert_close(ours[image].double(), plain, rtol=1e-4, atol=1e-4)


def test_predictions_depend_only_on_earlier_pixels(build, tmp_path):
    objective, inference = build(tmp_path / "c.yaml")
    ids = draw_ids(batch_size=1)
    embedding = inference.layers.modules[0]
    seen = []
    hook = embedding.content.register_forward_hook(
        lambda _, __, out: seen.append(out.retain_grad() or out)
    )
    logits = run_layers(inference.layers.modules, objective.inputs_from(ids))
    hook.remove()
    for place in range(16):
        seen[0].grad = None
        logits[place, 0].sum().backward(retain_graph=True)
        moved = seen[0].grad[0].abs().sum(-1) != 0
        # The first position reads the start vector, not a pixel; the last pixel is never read.
        assert moved.tolist() == [other < place for other in range(15)]


def test_bert_attention_is_bidirectional(build, tmp_path):
    objective, inference = build(tmp_path / "c.yaml", "objective.mode=bert")
    ids = draw_ids(batch_size=1)
    nothing = torch.zeros_like(ids, dtype=torch.bool)
    seen = []
    hook = inference.layers.modules[0].content.register_forward_hook(
        lambda _, __, out: seen.append(out.retain_grad() or out)
    )
    logits = run_layers(inference.layers.modules, objective.inputs_from(ids, mask=nothing))
    hook.remove()
    for place in range(16):
        seen[0].grad = None
        logits[place, 0].sum().backward(retain_graph=True)
        # Gradients show a dependence that an output's rounding would hide.
        assert (seen[0].grad[0].abs().sum(-1) > 0).all()


@pytest.mark.parametrize("num_new", [1, 3, 16])
def test_block_with_cache_matches_full_pass(build, tmp_path, num_new):
    _, inference = build(tmp_path / "c.yaml")
    block = inference.layers.modules[1]
    hidden = torch.randn(16, 2, 16, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        whole = block(hidden)
        cache, parts = KeyValueCache(capacity=16), []
        for start in range(0, 16, num_new):
            piece = hidden[start : start + num_new]
            parts.append(block(piece, cache))
            cache.advance()
    torch.testing.assert_close(torch.cat(parts), whole, rtol=1e-5, atol=1e-5)


def test_stacks_with_equal_layer_numbers_share_a_cache(build, tmp_path):
    """Keys and values are cached per block, not per layer number."""
    objective, _ = build(tmp_path / "c.yaml")
    torch.manual_seed(0)
    blocks = [Block(objective.core, number) for number in (1, 2, 1, 2)]
    hidden = torch.randn(16, 2, 16, generator=torch.Generator().manual_seed(0))

    def run(state, cache=None):
        for block in blocks:
            state = block(state, cache)
        return state

    with torch.no_grad():
        whole, cache, parts = run(hidden), KeyValueCache(capacity=16), []
        for place in range(16):
            parts.append(run(hidden[place : place + 1], cache))
            cache.advance()
    torch.testing.assert_close(torch.cat(parts), whole, rtol=1e-5, atol=1e-5)


def test_initial_weights_are_independent_of_build_order(build, tmp_path):
    objective, _ = build(tmp_path / "c.yaml")
    plans = objective.layer_plans()
    forward = [plan.build() for plan in plans]
    backward = [plan.build() for plan in reversed(plans)][::-1]
    for one, other in zip(forward, backward, strict=True):
        for mine, yours in zip(one.parameters(), other.parameters(), strict=True):
            assert torch.equal(mine, yours)
    first, second = (layer.self_attention.linear_qkv.weight for layer in forward[1:3])
    assert not torch.equal(first, second), "two blocks have the same initial weights"


def test_initial_weights_match_the_released_code(build, tmp_path):
    words = ["model.hidden_size=128", "model.num_layers=4", "model.num_attention_heads=4"]
    objective, _ = build(tmp_path / "c.yaml", *words)
    embedding, block, *_, head = [plan.build() for plan in objective.layer_plans()]
    expected = {
        embedding.content.weight: 0.02,
        embedding.positions.weight: 0.01,
        block.self_attention.linear_qkv.weight: 128**-0.5,
        block.self_attention.linear_proj.weight: (128 * 4) ** -0.5,
        block.mlp.linear_fc1.weight: 0.02,
        block.mlp.linear_fc2.weight: 0.02,
    }
    for weight, std in expected.items():
        # Five standard errors of the estimated standard deviation.
        assert abs(weight.std().item() / std - 1) < 5 / (2 * weight.numel()) ** 0.5
    assert head.linear.weight.abs().max() == 0
    drawn = build(tmp_path / "c.yaml", *words, "objective.logits_std=0.02")[0]
    weight = drawn.layer_plans()[-1].build().linear.weight
    assert abs(weight.std().item() / 0.02 - 1) < 5 / (2 * weight.numel()) ** 0.5


def test_flops_match_torch_flop_counter(build, tmp_path):
    objective, inference = build(tmp_path / "c.yaml", "objective.mode=bert")
    ids = draw_ids(batch_size=3)
    inputs = objective.inputs_from(ids, mask=torch.zeros_like(ids, dtype=torch.bool))
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        inference.predictions(inputs)
    ours = 3 * forward_flops(objective.config.model, objective.workload())
    # A training step costs three forward passes per image; this is one pass over three images.
    assert counter.get_total_flops() == ours
