"""`megavis params`: how many parameters a config has, and where, without allocating them."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from megavis.commands.arguments import add_config, read_config
from megavis.commands.parts import part_lines, parts_json
from megavis.config.arguments import positive

if TYPE_CHECKING:
    from megavis.composition.trainable import Trainable
    from megavis.config.schema import RunConfig
    from megavis.planning.parameters import Matrix, ModelPart
    from megavis.planning.states import StateMemory


def add_parser(subparsers: Any) -> None:
    """Add the command to the parser."""
    parser = subparsers.add_parser(
        "params",
        help="count the parameters of a config",
        description="Count the parameters of a config by part and by matrix. No weights are"
        " allocated, so any size is counted in seconds. With --processes also what weights,"
        " gradients and optimizer states take on each process in the config's layout.",
        epilog="example: megavis params yaml_configs/igpt/xl_64.yaml --processes 32",
    )
    add_config(parser)
    parser.add_argument(
        "--processes", type=positive, help="also print the memory of each of N processes"
    )
    parser.add_argument("--json", action="store_true", help="write JSON")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Count and write a table, or JSON.

    Raises:
        UserError: the config is wrong.
    """
    from megavis.commands.quiet import quietly

    loaded = read_config(args)
    if args.processes is not None:
        loaded.require_world(args.processes)
    with quietly():
        from megavis.papers import build_objective
        from megavis.parallel.context import close_context, open_context
        from megavis.parallel.launch import read_launch
        from megavis.planning.parameters import count_parameters, parts_of

    config = loaded.config
    with quietly():
        context = open_context(read_launch({}), device="cpu")
        objective = build_objective(config, context)
        matrices, memory = count_parameters(objective), None
        parts = parts_of(matrices, objective.layer_plans())
        if args.processes is not None:
            memory = count_memory(objective, matrices, args.processes)
        close_context()
    write = _as_json if args.json else _as_table
    sys.stdout.write(write(config, parts, memory))
    return 0


def count_memory(objective: Trainable, matrices: list[Matrix], num_processes: int) -> StateMemory:
    """Return what the fullest process of the config's layout holds before it has seen an image."""
    from megavis.planning.layouts import Layout
    from megavis.planning.parameters import Layers
    from megavis.planning.states import fullest_states

    config = objective.config
    layers = Layers.of(matrices, objective.layer_plans())
    layout = Layout.of(config, num_processes)
    return fullest_states(
        layers,
        layout,
        precision=config.training.precision,
        keeps_average=bool(config.optimizer.ema_decay),
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
    return f"GB a process before any image, {precision}, ZeRO-{zero}: {words}"
