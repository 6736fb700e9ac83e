"""The parts of a model by name, where it has more than one stack of blocks: a table, and JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megavis.model.parts import StackSize
    from megavis.planning.parameters import ModelPart


def part_lines(parts: Sequence[ModelPart]) -> list[str]:
    """Return a row for each part; nothing where there is one stack."""
    stacks = _stacks(parts)
    if len(stacks) < 2:
        return []
    has_phases = len({stack.phase for stack in stacks}) > 1
    width = max(len(part.name) for part in parts) + 2
    head = f"{'parameters':>15}{'blocks':>8}{'width':>8}{'heads':>7}{'tokens':>8}{'GFLOP':>10}"
    lines = [f"  {'part':{width}}{head}{'  generation' * has_phases}"]
    for part in parts:
        row = f"  {part.name:{width}}{part.parameters:>15,}"
        if (stack := part.stack) is not None:
            row += f"{stack.num_layers:>8}{stack.hidden_size:>8,}{stack.num_heads:>7}"
            row += f"{stack.num_tokens:>8,}{stack.flops / 1e9:>10,.2f}"
            row += f"  {_WHEN[stack.phase]}" * has_phases
        lines.append(row)
    return lines


_WHEN = {"once": "once", "step": "each step"}


def parts_json(parts: Sequence[ModelPart]) -> dict[str, Any]:
    """Return the sizes of all stacks, in operations an image; nothing where there is one."""
    stacks = _stacks(parts)
    return {"stacks": [asdict(stack) for stack in stacks]} if len(stacks) > 1 else {}


def _stacks(parts: Sequence[ModelPart]) -> list[StackSize]:
    return [part.stack for part in parts if part.stack is not None]
