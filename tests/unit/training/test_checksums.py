"""Corruption checks: checksums, disagreement between ranks, and tolerances."""

import math
from types import SimpleNamespace

import pytest
import torch

from megavis.model.kernels import chosen_kernels
from megavis.training.faults import corruption_check
from megavis.training.faults.corruption_check import (
    CheckReplicas,
    Disagreement,
    Losses,
    allowed_difference,
    checksum,
    disagreement,
    loss_disagreement,
)

pytestmark = pytest.mark.once


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
def test_any_flipped_bit_changes_the_checksum(dtype):
    tensor = torch.arange(-6, 6).to(dtype).view(3, 4)
    integer = {2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()]
    before = int(checksum(tensor))
    for place in range(tensor.numel()):
        for bit in range(8 * tensor.element_size() - 1):
            changed = tensor.clone()
            changed.view(integer).view(-1)[place] ^= 1 << bit
            assert int(checksum(changed)) != before
    assert int(checksum(tensor.clone())) == before
    assert int(checksum(tensor.flip(0))) != before


def test_checksum_matches_its_formula(monkeypatch):
    monkeypatch.setattr(corruption_check, "_PIECE", 5)
    tensor = torch.randn(17)
    bits = tensor.view(torch.int32).tolist()
    wanted = sum(one * (2 * place + 1) for place, one in enumerate(bits)) % 2**64
    assert int(checksum(tensor)) % 2**64 == wanted


def test_disagreement_names_the_minority_rank():
    agreed = {"a": 1, "b": 2}
    assert disagreement({f"rank {n}": agreed for n in range(3)}) == Disagreement()
    prints = {"rank 0": agreed, "rank 1": {"a": 1, "b": 3}, "rank 2": agreed}
    minority = Disagreement("b on rank 1 differs from 2 others", frozenset({"rank 1"}))
    assert disagreement(prints) == minority
    # Parts held by a single rank are not compared.
    apart = {"rank 0": {"c (part 0)": 1}, "rank 1": {"c (part 1)": 2}}
    assert disagreement(apart) == Disagreement()
    two = disagreement({"rank 0": {"a": 1}, "rank 1": {"a": 2}})
    assert two.text == "a differs between rank 0, rank 1: which is right is unknown"
    assert not two.wrong


def engine_on(device, tensor_size, *, precision="bf16", deterministic=False):
    """Return a stub of the engine attributes that the checks read."""
    training = SimpleNamespace(precision=precision, deterministic=deterministic)
    tensor = SimpleNamespace(size=tensor_size, rank=1)
    context = SimpleNamespace(device=torch.device(device), tensor=tensor)
    return SimpleNamespace(context=context, config=SimpleNamespace(training=training))


@pytest.mark.parametrize(
    ("device", "tensor_size", "precision", "allowed"),
    [
        ("cpu", 2, "bf16", 0.0),
        ("cuda", 1, "bf16", 0.0),
        ("cuda", 2, "bf16", 2**-8),
        ("cuda", 2, "float32", 1e-5),
    ],
)
def test_allowed_difference_covers_nccl_reductions(device, tensor_size, precision, allowed):
    assert allowed_difference(engine_on(device, tensor_size, precision=precision)) == allowed


def test_loss_disagreement_respects_the_tolerance():
    near = math.nextafter(2.0, 3.0)
    losses = {f"rank {n}": Losses(0, 2.0, 2.0) for n in range(3)} | {"rank 3": Losses(1, 5.0, 5.0)}
    assert loss_disagreement(losses, 0.0) == Disagreement()
    other_order = losses | {"rank 1": Losses(0, near, 2.0)}
    assert loss_disagreement(other_order, 1e-5) == Disagreement()
    first = frozenset({"rank 1"})
    two = Disagreement("two passes over the same images give two losses on rank 1", first)
    assert loss_disagreement(other_order, 0.0) == two
    text = "the loss in part 0 of the model on rank 1 differs from 2 others"
    wrong = Disagreement(text, first)
    assert loss_disagreement(losses | {"rank 1": Losses(0, near, near)}, 0.0) == wrong
    for loss in (2.1, math.inf, math.nan):
        assert loss_disagreement(losses | {"rank 1": Losses(0, loss, loss)}, 1e-5) == wrong
    lost = {name: Losses(0, math.nan, math.nan) for name in ("rank 0", "rank 1")}
    assert loss_disagreement(lost, 0.0) == Disagreement()


@pytest.mark.parametrize(
    ("engine", "is_compared"),
    [
        (engine_on("cpu", 2), True),
        (engine_on("cuda", 2), False),
        (engine_on("cuda", 2, deterministic=True), True),
        (engine_on("cuda", 1), True),
    ],
)
def test_replicated_weights_are_compared_if_kernels_are_deterministic(engine, is_compared):
    gain = torch.nn.Parameter(torch.ones(2))
    engine.config.parallel = SimpleNamespace(zero_stage=1)
    engine.layers = SimpleNamespace(named_parameters=lambda: [("norm.weight", gain)])
    (name,) = corruption_check.weight_fingerprints(engine)
    # Names with a part are compared only within the data-parallel group.
    assert name == ("norm.weight" if is_compared else "norm.weight (part 1)")


def test_losses_are_computed_with_the_same_kernels_everywhere(monkeypatch):
    """Generated kernels are not: each process times their tiles for itself."""
    used = []

    class Passes:
        def __init__(self, *_):
            pass

        def predictions(self, _):
            used.append(chosen_kernels())

    def note(*_):
        used.append(chosen_kernels())
        return SimpleNamespace(inputs=(), targets=())

    def loss(*_):
        used.append(chosen_kernels())
        return torch.tensor(1.0)

    monkeypatch.setattr(corruption_check, "Inference", Passes)
    monkeypatch.setattr(CheckReplicas, "_first_micro_batch", lambda *_: torch.zeros(1))
    engine = engine_on("cpu", 1)
    engine.layers, engine.context.model = None, SimpleNamespace(rank=0)
    engine.objective = SimpleNamespace(sequence=note, loss=loss)
    assert CheckReplicas.losses(object.__new__(CheckReplicas), engine, 1) == Losses(0, 1.0, 1.0)
    assert used == 6 * ["torch"]
    assert chosen_kernels() == "auto"
