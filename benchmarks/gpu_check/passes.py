"""A forward and backward pass, and the comparison of two."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from benchmarks.gpu_check.results import Row
from megavis.composition.trainable import Trainable
from megavis.config.errors import counted
from megavis.data.loading.loader import Batch
from megavis.model.compiled_blocks import take_compilation
from megavis.model.stack import LayerStack

FLOAT32, BF16_LOSS, BF16_GRADIENT = 1e-5, 0.02, 0.1
"""Tolerances, as relative differences."""


@dataclass(frozen=True)
class Pass:
    """A loss and its gradients by parameter, on the CPU in float32."""

    loss: float
    gradients: Mapping[str, Tensor]


def one_pass(objective: Trainable, stack: LayerStack, batch: Batch) -> Pass:
    """Return loss and gradients of a batch on the stack's device."""
    stack.zero_grad(set_to_none=True)
    sequence = objective.training_sequence(batch)
    loss = stack(sequence.inputs, sequence.targets)
    loss.backward()
    gradients = {
        name: parameter.grad.detach().cpu().float().clone()
        for name, parameter in stack.named_parameters()
        if parameter.grad is not None
    }
    return Pass(float(loss), gradients)


def differences(
    name: str, found: Pass, wanted: Pass, limits: Sequence[float], note: str = ""
) -> list[Row]:
    """Return the relative differences of the loss and of the concatenated gradients.

    Args:
        name: name of the comparison.
        found: a pass.
        wanted: the reference pass.
        limits: tolerances of loss and gradients.
        note: note for the reader.
    """
    assert found.gradients.keys() == wanted.gradients.keys()
    squares, total, shares = 0.0, 0.0, {}
    for key, right in wanted.gradients.items():
        error = float((found.gradients[key].double() - right.double()).square().sum())
        squares, total = squares + error, total + float(right.double().square().sum())
        shares[key] = error
    worst = max(shares, key=lambda key: shares[key])
    values = {
        "loss": abs(found.loss - wanted.loss) / max(abs(wanted.loss), 1e-30),
        "gradients": (squares / max(total, 1e-300)) ** 0.5,
    }
    detail = {"loss": found.loss, "reference": wanted.loss, "largest error in": worst}
    return [
        Row(
            f"{name}: {what}",
            value,
            aim=f"≤ {limit:g}",
            passed=value <= limit,
            note=note,
            detail=detail,
        )
        for (what, value), limit in zip(values.items(), limits, strict=True)
    ]


def compilation_row(name: str, *, whole: bool) -> Row:
    """Return the time of compiling blocks in this process since the last call.

    Args:
        name: name of the run.
        whole: whether its blocks must be compiled whole, or must not.
    """
    found = take_compilation()
    passed = not found.failure and bool(found.graphs) == whole
    note = found.failure or counted(found.graphs, "graph")
    return Row(f"{name}: compiling blocks", found.seconds, "s", passed=passed, note=note)
