"""`megavis params`: count the parameters of a config by part, without allocating them."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from megavis.commands.opening import job_closed
from megavis.commands.quiet import quietly
from megavis.composition.trainable import Trainable
from megavis.config.schema import RunConfig
from megavis.model.parts import StackSize
from megavis.papers import build_objective
from megavis.parallel.context import open_context
from megavis.parallel.launch import read_launch
from megavis.planning.layouts import Layout
from megavis.planning.parameters import (
    Layers,
    Matrix,
    ModelPart,
    count_parameters,
    parts_of,
    trained_only,
)
from megavis.planning.states import MOMENTS, StateMemory, fullest_states

_WHEN = {"once": "once", "step": "each step"}


def run(args: argparse.Namespace) -> int:
    """Count and write a table, or JSON."""
    config = args.loaded.config
    with quietly(), job_closed():
        objective = build_objective(config, open_context(read_launch({}), device="cpu"))
        matrices, memory = count_parameters(objective), None
        parts = parts_of(matrices, objective.layer_plans())
        if args.processes is not None:
            memory = count_memory(objective, matrices, args.processes)
    write = _as_json if args.json else _as_table
    sys.stdout.write(write(config, parts, memory))
    return 0


def count_memory(objective: Trainable, matrices: list[Matrix], num_processes: int) -> StateMemory:
    """Return the memory of the fullest process in the config's layout before any image."""
    config = objective.config
    plans = objective.layer_plans()
    return fullest_states(
        Layers.of(matrices, plans),
        Layout.of(config, num_processes),
        precision=config.training.precision,
        keeps_average=bool(config.optimizer.ema_decay),
        trained=Layers.of(trained_only(matrices), plans),
        num_moments=MOMENTS[config.optimizer.algorithm],
    )


def _as_json(config: RunConfig, parts: list[ModelPart], memory: StateMemory | None) -> str:
    tree = {
        "name": config.name,
        "total": sum(part.parameters for part in parts),
        "parts": {part.name: part.parameters for part in parts},
        **parts_json(parts),
        "matrices": [
            {
                "name": matrix.name,
                "shape": list(matrix.shape),
                "copies": matrix.copies,
                "parameters": matrix.parameters,
            }
            for part in parts
            for matrix in part.matrices
        ],
    }
    if memory is not None:
        tree["bytes_a_process"] = {**asdict(memory), "total": memory.total}
    return json.dumps(tree, indent=2) + "\n"


def _as_table(config: RunConfig, parts: list[ModelPart], memory: StateMemory | None) -> str:
    total = sum(part.parameters for part in parts)
    width = max(len(matrix.name) for part in parts for matrix in part.matrices) + 2
    lines = [f"{config.name}: {total:,} parameters", *part_lines(parts)]
    for part in parts:
        count = part.parameters
        lines.append(f"{part.name:{width + 23}}{count:>16,}{count / total:>8.2%}")
        for matrix in part.matrices:
            shape = " × ".join(map(str, matrix.shape))
            copies = f"{matrix.copies} of" if matrix.copies > 1 else ""
            row = f"  {matrix.name:{width}}{copies:>6} {shape:14}{matrix.parameters:>16,}"
            lines.append(f"{row}{matrix.parameters / total:>8.2%}")
    if memory is not None:
        lines.append(_memory_line(config, memory))
    return "\n".join(lines) + "\n"


def _memory_line(config: RunConfig, memory: StateMemory) -> str:
    parts = {**asdict(memory), "total": memory.total}
    words = ", ".join(f"{name} {size / 1e9:.2f}" for name, size in parts.items())
    zero, precision = config.parallel.zero_stage, config.training.precision
    return f"GB per process before any image, {precision}, ZeRO-{zero}: {words}"


def part_lines(parts: Sequence[ModelPart]) -> list[str]:
    """Return a row for each part; nothing if there is only one stack."""
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


def parts_json(parts: Sequence[ModelPart]) -> dict[str, Any]:
    """Return the sizes of all stacks, with FLOPs per image; empty if there is only one."""
    stacks = _stacks(parts)
    return {"stacks": [asdict(stack) for stack in stacks]} if len(stacks) > 1 else {}


def _stacks(parts: Sequence[ModelPart]) -> list[StackSize]:
    return [part.stack for part in parts if part.stack is not None]
