"""`megavis plan` and `megavis params`: estimate the cost of a run, and count its parameters.

Neither allocates the weights.
"""

from __future__ import annotations

import argparse
import os
import shlex
import sys
import textwrap
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from megavis.commands.opening import job_closed
from megavis.commands.terminal import quietly
from megavis.composition.trainable import Trainable
from megavis.config.checks import require_world
from megavis.config.errors import UserError
from megavis.config.load import LoadedConfig
from megavis.config.schema import RunConfig
from megavis.config.section import ParallelConfig
from megavis.config.yaml_tree import BASED_ON, ConfigSource, apply_override, dump_tree
from megavis.data.format.files import to_json, write_atomically
from megavis.data.loading.needs import needs_lines
from megavis.model.stack import StackSize
from megavis.papers import build_objective
from megavis.parallel.context import joined_device, open_context
from megavis.parallel.launch import read_launch
from megavis.planning.data_rates import (
    DataRates,
    complaints,
    data_json,
    encodes_images,
    find_needs,
    rate_lines,
)
from megavis.planning.devices import Cluster, open_device
from megavis.planning.frozen_networks import frozen_networks
from megavis.planning.host_time import read_measured
from megavis.planning.layouts import Layout, all_layouts, with_layout
from megavis.planning.measured_activations import activations_of_layouts
from megavis.planning.parameters import (
    Layers,
    Matrix,
    ModelPart,
    count_parameters,
    parts_of,
    trained_only,
)
from megavis.planning.plan import Plan, Recommendation, plan_layout, recommend
from megavis.planning.shape import ModelShape, require_blocks, shape_of
from megavis.planning.states import MOMENTS, StateMemory, fullest_states
from megavis.planning.step_time import sources

_SHOWN = 10
_WHEN = {"once": "once", "step": "each step"}


def run(args: argparse.Namespace) -> int:
    """Plan and write a table or JSON, and the recommended config; return 2 if nothing fits."""
    loaded = args.loaded
    require_blocks(loaded.config)
    device = open_device(args.gpu, memory=args.gpu_memory, interconnect=args.interconnect)
    measured = None if args.measured is None else read_measured(args.measured)
    cluster = Cluster(device, args.gpus, min(args.gpus, args.gpus_per_node), measured)
    with quietly():
        shape = measure(loaded, cluster.num_devices, args.tokenizer)
    found = recommend(loaded.config, shape, cluster)
    asked = _asked(loaded, shape, cluster)
    data = _data(loaded, asked if isinstance(asked, Plan) else found.best, cluster)
    if args.json:
        tree = as_json(loaded, shape, asked, found, cluster) | {"data": data.tree}
        sys.stdout.write(to_json(tree, indent=2) + "\n")
    else:
        sys.stdout.write(_as_table(loaded, shape, cluster, asked, found))
        sys.stdout.write("".join(f"{line}\n" for line in ("", "Data:", *data.lines)))
    if args.write is not None and found.best is not None:
        tree = _tree(args.write, loaded, found.best, args.overrides)
        text = _head(args, loaded, found.best, cluster) + dump_tree(tree)
        write_atomically(args.write, text.encode())
    return 0 if found.best is not None and not data.is_refused else 2


@dataclass(frozen=True)
class _Data:
    """What the training data need, as text and as JSON, and whether that cannot work."""

    lines: list[str]
    tree: dict[str, Any]
    is_refused: bool


def _data(loaded: LoadedConfig, plan: Plan | None, cluster: Cluster) -> _Data:
    """Return what the training data need of a node with a plan's layout."""
    needs = find_needs(loaded.config.data)
    if isinstance(needs, str):
        return _Data([f"  not counted: {needs}"], {"unknown": needs}, False)
    refusals = [
        str(loaded.source.located(UserError(text, key=key)))
        for key, text in complaints(loaded.config.data, needs)
    ]
    rates = None if plan is None else DataRates.of(needs, plan, cluster)
    found = needs_lines(needs)
    if plan is not None and rates is not None:
        found = rate_lines(needs, rates, plan.layout.name)
    lines = [*(f"  {line}" for line in found), *(f"  CANNOT WORK: {text}" for text in refusals)]
    return _Data(lines, {**data_json(needs, rates), "refused": refusals}, bool(refusals))


def measure(
    loaded: LoadedConfig, num_processes: int, tokenizers: Sequence[Path] = ()
) -> ModelShape:
    """Return the model's sizes for all layouts of N processes; no context may be open.

    Args:
        tokenizers: configs of frozen networks that are not trained yet.
    """
    config = loaded.config
    with job_closed():
        context = open_context(read_launch({}), device=joined_device("cpu"))
        objective = build_objective(config, context)
        shape = shape_of(objective, {})
        encoders = objective.frozen_encoders if encodes_images(config.data) else ()
        frozen, uncounted = frozen_networks(encoders, tokenizers)
        shape = replace(shape, frozen=frozen, uncounted=uncounted)
    layouts = all_layouts(config, num_processes)
    activations = activations_of_layouts(with_layout(config, layout.parallel) for layout in layouts)
    return replace(shape, activations=activations)


def _asked(loaded: LoadedConfig, shape: ModelShape, cluster: Cluster) -> Plan | str:
    """Return the plan of the config's own layout, or why it is illegal."""
    try:
        with loaded.source.locate():
            require_world(loaded.config, cluster.num_devices)
    except UserError as error:
        return str(error)
    layout = Layout.of(loaded.config, cluster.num_devices)
    return plan_layout(shape, layout, cluster, steps=loaded.config.training.steps)


def as_json(
    loaded: LoadedConfig,
    shape: ModelShape,
    asked: Plan | str,
    found: Recommendation,
    cluster: Cluster,
) -> dict[str, Any]:
    """Return all estimates, in bytes, seconds and FLOPs."""
    return {
        "name": loaded.config.name,
        "parameters": sum(part.parameters for part in shape.parts),
        "flops_per_image": shape.total_flops,
        **parts_json(shape.parts),
        "frozen": [asdict(network) for network in shape.frozen],
        "uncounted": [encoder.run_folder for encoder in shape.uncounted],
        "asked": {"illegal": asked} if isinstance(asked, str) else _plan_json(asked, cluster),
        "recommended": None if found.best is None else _plan_json(found.best, cluster),
        "reasons": list(found.reasons),
        "legal": len(found.plans),
        "fitting": len(found.fitting),
        "ranking": [_row(plan) for plan in found.plans[:_SHOWN]],
    }


def _plan_json(plan: Plan, cluster: Cluster) -> dict[str, Any]:
    memory = asdict(plan.memory)
    memory["states"]["total"] = plan.memory.states.total
    memory["activations"]["total"] = plan.memory.activations.total
    return {
        **_row(plan),
        "memory": {**memory, "total": plan.memory.total},
        "traffic": [asdict(transfer) for transfer in plan.traffic],
        "time": {**asdict(plan.time), "total": plan.time.total},
        "sources": sources(plan.time, cluster),
    }


def _row(plan: Plan) -> dict[str, Any]:
    return {
        "layout": plan.layout.name,
        "fits": plan.fits,
        "waits_for_host": plan.time.waits_for_host,
        "experimental": plan.layout.is_experimental,
        "bytes": plan.memory.total,
        "seconds_a_step": plan.time.total,
        "mfu": plan.time.mfu,
        "days": plan.days,
    }


def _as_table(
    loaded: LoadedConfig,
    shape: ModelShape,
    cluster: Cluster,
    asked: Plan | str,
    found: Recommendation,
) -> str:
    device = cluster.device
    lines = [
        f"{loaded.config.name}: {sum(part.parameters for part in shape.parts):,} parameters,"
        f" {shape.total_flops / 1e12:.3f} TFLOP per image in training",
        *part_lines(shape.parts),
        *_frozen_lines(shape),
        f"{cluster.num_devices} {device.name} of {device.memory_gb:g} GB, of which"
        f" {cluster.usable_memory / 1e9:.1f} are usable; {cluster.devices_per_node} per node,"
        f" {device.network_gb_per_s:g} GB/s for each between nodes",
        "",
        "As configured:",
        *([f"  not legal: {asked}"] if isinstance(asked, str) else _details(asked, cluster)),
        "",
        f"{len(found.fitting)} of {len(found.plans)} legal settings fit."
        + (" The fastest:" if found.fitting else " The smallest:"),
        f"  {'layout':36}{'GB':>8}{'s per step':>11}{'MFU':>7}{'days':>9}",
        *(
            f"  {plan.layout.name:36}{plan.memory.total / 1e9:8.1f}{plan.time.total:10.3f}"
            f"{plan.time.mfu:7.1%}{plan.days:9.1f}{_notes(plan)}"
            for plan in found.plans[:_SHOWN]
        ),
        "",
    ]
    if found.best is not None:
        lines += [f"Recommended: {found.best.layout.name}", *_details(found.best, cluster)]
    return "\n".join([*lines, *(f"  {reason}" for reason in found.reasons)]) + "\n"


def _frozen_lines(shape: ModelShape) -> list[str]:
    """Return what encodes images in each step, and what of it is not counted."""
    counted = (
        f"each step encodes its images by {network.name}: {network.parameters:,} frozen parameters,"
        f" {network.flops / 1e12:.3f} TFLOP per image in float32"
        for network in shape.frozen
    )
    uncounted = (
        f"each step encodes its images by {encoder.run_folder} ({encoder.key}), which does not"
        " exist yet and is NOT COUNTED: name its config by --tokenizer, or shards of its outputs"
        " in data.train"
        for encoder in shape.uncounted
    )
    return [*counted, *uncounted]


def _notes(plan: Plan) -> str:
    """Return what keeps a layout from being recommended."""
    waits = "  waits for the host" if plan.time.waits_for_host else ""
    return waits + "  experimental" * plan.layout.is_experimental


def _details(plan: Plan, cluster: Cluster) -> list[str]:
    memory, time = plan.memory, plan.time
    states, kept = memory.states, memory.activations
    verdict = "fits" if plan.fits else "DOES NOT FIT"
    lines = [
        f"  {plan.layout.name}: {memory.total / 1e9:.2f} GB on the fullest GPU, {verdict}",
        f"  states       weights {states.weights / 1e9:.2f}, gradients"
        f" {states.gradients / 1e9:.2f}, optimizer {states.optimizer / 1e9:.2f}, average"
        f" {states.average / 1e9:.2f}, gathered layer {states.gathered / 1e9:.2f}, frozen networks"
        f" {states.frozen / 1e9:.2f} GB",
        f"  activations  {kept.in_flight} under way: first layer {kept.first / 1e9:.2f}, blocks"
        f" {kept.blocks / 1e9:.2f} ({kept.block / 1e9:.3f} each), head {kept.head / 1e9:.2f};"
        f" during the passes {kept.passes / 1e9:.2f}, for other stages {kept.transit / 1e9:.2f},"
        f" outputs {kept.outputs / 1e9:.2f}; while images are encoded"
        f" {kept.encoding / 1e9:.2f} GB",
        f"  buffers      {memory.buffers / 1e9:.2f} GB",
        f"  step         {time.total:.3f} s: products {time.products:.3f}, element-wise"
        f" {time.elementwise:.3f}, encoding of images {time.encoding:.3f}, bubble"
        f" {time.bubble:.3f}, exposed communication"
        f" {time.communication:.3f}, optimizer {time.optimizer:.3f}; overlapped communication"
        f" {time.overlapped:.3f}; host {time.host:.3f}{_notes(plan)}",
        f"  run          MFU {time.mfu:.1%}; {plan.steps:,} steps in {plan.days:.1f} days",
    ]
    for transfer in plan.traffic:
        hidden = ", overlapped with compute" if transfer.is_hidden else ""
        lines.append(
            f"  sends        {transfer.kind}: {transfer.inside / 1e9:.2f} GB inside a node,"
            f" {transfer.between / 1e9:.2f} between nodes{hidden}"
        )
    known = sources(plan.time, cluster)
    return [*lines, *(f"  known        {name}: {how}" for name, how in known.items())]


def _command(args: argparse.Namespace) -> str:
    """Return the relevant options, as typed."""
    words = ["megavis", "plan", args.config, *args.overrides, "--gpus", str(args.gpus)]
    words += ["--gpu", args.gpu]
    words += [word for path in args.tokenizer for word in ("--tokenizer", str(path))]
    if args.gpus_per_node != 8:
        words += ["--gpus-per-node", str(args.gpus_per_node)]
    for option, value in (
        ("--gpu-memory", args.gpu_memory),
        ("--interconnect", args.interconnect),
        ("--measured", args.measured),
    ):
        if value is not None:
            words += [option, str(value)]
    return shlex.join(words)


def _tree(path: Path, loaded: LoadedConfig, plan: Plan, overrides: Sequence[str]) -> dict[str, Any]:
    """Return a config with the recommended layout, based on the given one and its overrides.

    The folder and name of its path become the run's name, unless that is overridden.
    """
    own, asked = plan.layout.parallel.model_dump(), loaded.config.parallel.model_dump()
    plain = ParallelConfig().model_dump()
    always = ("zero_stage", "activation_checkpointing")
    chosen = {
        key: own[key]
        for key in own
        if key in always or own[key] != asked[key] or own[key] != plain[key]
    }
    base = os.path.relpath(loaded.source.path, path.parent)
    tree: dict[str, Any] = {BASED_ON: base, "name": f"{path.resolve().parent.name}_{path.stem}"}
    for word in overrides:
        apply_override(tree, word, ConfigSource(str(path)))
    if any(_is_section(tree, word.partition("=")[0]) for word in overrides):
        # The word replaced its section, whereas a file's keys are merged with its base's.
        tree = loaded.config.model_dump(mode="json") | {"name": tree["name"]}
        chosen = own
    layout = {"parallel": chosen, "training": {"micro_batch_size": plan.layout.micro_batch_size}}
    return tree | {section: (tree.get(section) or {}) | keys for section, keys in layout.items()}


def _is_section(tree: dict[str, Any], key: str) -> bool:
    """Return whether a dotted key holds keys."""
    value: Any = tree
    for part in key.split("."):
        value = value.get(part) if isinstance(value, dict) else None
    return isinstance(value, dict)


def _head(args: argparse.Namespace, loaded: LoadedConfig, plan: Plan, cluster: Cluster) -> str:
    """Return the comment above the recommended layout."""
    path, base = args.write, Path(loaded.source.path)
    head = [
        f"# {loaded.config.name} on {cluster.num_devices} {cluster.device.name} GPUs,"
        f" {cluster.devices_per_node} to a node. Made by",
        f"#   {_command(args)} --write {path}",
        "# which estimates, without having run it on a GPU:",
        f"#   {plan.memory.total / 1e9:.1f} GB on the fullest GPU, {plan.time.total:.3f} s a step,"
        f" {plan.days:.1f} days for {plan.steps:,} steps.",
        "# Where these numbers come from:",
        *(
            f"#{line}"
            for name, how in sources(plan.time, cluster).items()
            for line in textwrap.wrap(
                f"{name}: {how}", 115, initial_indent="   ", subsequent_indent="     "
            )
        ),
    ]
    if path.resolve().parent == base.resolve().parent:
        # Path of the schema for editors, relative to the folder.
        lines = base.read_text(encoding="utf-8").splitlines()
        head += [line for line in lines if line.startswith("# yaml-language-server")]
    return "\n".join([*head, "", ""])


def count(args: argparse.Namespace) -> int:
    """Count and write a table, or JSON."""
    config = args.loaded.config
    if args.processes is not None:
        require_world(config, args.processes)
    with quietly(), job_closed():
        context = open_context(read_launch({}), device=joined_device("cpu"))
        objective = build_objective(config, context)
        matrices, memory = count_parameters(objective), None
        parts = parts_of(matrices, objective.layer_plans())
        if args.processes is not None:
            memory = count_memory(objective, matrices, args.processes)
    write = _counts_json if args.json else _counts_table
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


def _counts_json(config: RunConfig, parts: list[ModelPart], memory: StateMemory | None) -> str:
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
    return to_json(tree, indent=2) + "\n"


def _counts_table(config: RunConfig, parts: list[ModelPart], memory: StateMemory | None) -> str:
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
        states = {**asdict(memory), "total": memory.total}
        sizes = ", ".join(f"{name} {size / 1e9:.2f}" for name, size in states.items())
        how = f"{config.training.precision}, ZeRO-{config.parallel.zero_stage}"
        lines.append(f"GB per process before any image, {how}: {sizes}")
    return "\n".join(lines) + "\n"


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
