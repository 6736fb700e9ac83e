"""`activation_checkpointing: selective`: equal results, less memory, no further matrix products."""

import pytest
import torch
from small_batches import batch_of, photographs
from tiny import BLOCK_OBJECTIVES, VIT, tiny
from torch.utils.flop_counter import FlopCounterMode

from megavis.model.activations import with_recomputed
from megavis.planning.meta_device import num_bytes, saved_tensors

SELECTIVE = "parallel.activation_checkpointing=selective"
DROPOUT = ["model.hidden_dropout=0.2", "model.mlp_dropout=0.2", "model.drop_path=0.4"]


def step_of(build_paper, name, *words, dtype=torch.float32):
    """Return what autograd saves in a step, its FLOPs, its loss and its gradients."""
    model = {"num_layers": 2, "hidden_size": 32} | ({} if name == "igpt" else VIT)
    text = tiny(BLOCK_OBJECTIVES[name], model=model, data={"image_size": 12})
    objective, inference = build_paper(text, *words, std=0.1)
    layers = [layer.to(dtype).train() for layer in inference.layers.modules]
    ids = torch.randint(12, (2, 144), generator=torch.Generator().manual_seed(3))
    batch = batch_of(ids if name == "igpt" else photographs(2, 12))
    sequence = objective.training_sequence(batch)

    def forward():
        state = sequence.inputs
        for layer in layers:
            state = layer(state)
        return objective.loss(state, sequence.targets)

    torch.manual_seed(1)
    with FlopCounterMode(display=False) as counter:
        saved, loss = saved_tensors(forward, layers)
        size = num_bytes(saved)
        del saved
        loss.backward()
    gradients = {name: each.grad for name, each in inference.layers.named_parameters()}
    return size, counter.get_total_flops(), loss.detach(), gradients


@pytest.mark.parametrize(
    ("name", "words", "dtype"),
    [
        *((name, [], torch.float32) for name in BLOCK_OBJECTIVES),
        ("igpt", [], torch.bfloat16),
        *((name, DROPOUT, torch.bfloat16) for name in ("gvp", "memory")),
    ],
)
def test_selective_recomputation_changes_only_the_memory(build_paper, name, words, dtype):
    size, flops, loss, gradients = step_of(build_paper, name, *words, dtype=dtype)
    less, again, same, others = step_of(build_paper, name, *words, SELECTIVE, dtype=dtype)
    assert less < size
    assert again == flops
    assert torch.equal(same, loss)
    assert gradients.keys() == others.keys()
    for parameter, gradient in gradients.items():
        assert torch.equal(others[parameter], gradient), parameter


def test_a_block_keeps_no_outputs_of_norms_and_activations(build_paper):
    """In float32 a block of iGPT keeps 10 of 16 numbers per token and channel."""
    text = tiny(BLOCK_OBJECTIVES["igpt"], model={"num_layers": 2, "hidden_size": 64})
    kept = {}
    for kind in ("none", "selective"):
        _, inference = build_paper(text, f"parallel.activation_checkpointing={kind}")
        block = inference.layers.modules[1].train()
        hidden = torch.randn(16, 2, 64, requires_grad=True)
        saved, _ = saved_tensors(lambda block=block, hidden=hidden: block(hidden), [block])
        kept[kind] = num_bytes(saved) / hidden.nbytes
    assert kept["none"] == pytest.approx(16, rel=0.02)
    assert kept["selective"] == pytest.approx(10, rel=0.02)


def test_evaluation_frees_nothing():
    x, seen = torch.randn(3), []
    with torch.no_grad():
        with_recomputed(torch.exp, x, lambda middle: (seen.append(middle), None))
    assert torch.equal(seen[0], x.exp())
