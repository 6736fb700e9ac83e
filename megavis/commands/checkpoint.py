"""`megavis checkpoint`: list, verify, prune and convert the checkpoints of a run."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from megavis.commands.arguments import add_run, add_step
from megavis.config.arguments import non_negative, positive
from megavis.config.errors import UserError


def add_parser(subparsers: Any) -> None:
    """Add the command and its verbs to the parser."""
    parser = subparsers.add_parser(
        "checkpoint",
        help="list, verify, prune or convert the checkpoints of a run",
        description="Look after the checkpoints of a run. They belong to no layout: any layout"
        " reads them as they are.",
        epilog="example: megavis checkpoint verify runs/igpt_demo",
    )
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="VERB")
    listing = _add_verb(verbs, "list", "steps, layouts that saved them, sizes", _list)
    listing.add_argument("--json", action="store_true", help="write JSON")
    verify = _add_verb(verbs, "verify", "read every byte; name damaged files and tensors", _verify)
    verify.add_argument("--step", type=non_negative, help="this one alone; default: all")
    prune = _add_verb(verbs, "prune", "delete old ones; the latest always stays", _prune)
    prune.add_argument("--keep-last", type=positive, required=True, help="newest ones to keep")
    prune.add_argument(
        "--keep-every",
        type=non_negative,
        default=0,
        help="keep those of every N-th step too; 0: none",
    )
    convert = _add_verb(
        verbs, "convert", "write one in the slices of another layout, offline", _convert
    )
    convert.add_argument("target", type=Path, help="run folder to write into")
    add_step(convert)
    convert.add_argument("--tensor", type=positive, default=1, help="tensor-parallel size")
    convert.add_argument("--data", type=positive, default=1, help="data-parallel size")


def _add_verb(verbs: Any, name: str, text: str, run: Any) -> argparse.ArgumentParser:
    example = {
        "list": "",
        "verify": "",
        "prune": " --keep-last 2 --keep-every 10000",
        "convert": " runs/igpt_demo_tp2 --tensor 2",
    }[name]
    parser: argparse.ArgumentParser = verbs.add_parser(
        name,
        help=text,
        description=f"{text[0].upper()}{text[1:]}.",
        epilog=f"example: megavis checkpoint {name} runs/igpt_demo{example}",
    )
    add_run(parser)
    parser.set_defaults(run=run)
    return parser


def _steps(run_folder: Path) -> list[int]:
    from megavis.checkpoint.format.folder import saved_steps

    steps = saved_steps(run_folder)
    if not steps:
        raise UserError(f"{run_folder}: has no checkpoints")
    return steps


def _list(args: argparse.Namespace) -> int:
    """Write a line for each checkpoint; returns 2 where one is incomplete."""
    rows = list(_rows(args.run_folder))
    if args.json:
        sys.stdout.write(json.dumps(rows, indent=2) + "\n")
    else:
        for row in rows:
            state = row["problem"] or "complete"
            mark = " (latest)" if row["is_latest"] else ""
            sys.stdout.write(
                f"{row['step']:>10}  {row['bytes'] / 1e9:8.3f} GB  {row['layout']:12}"
                f"  {state}{mark}\n"
            )
    return 2 if any(row["problem"] for row in rows) else 0


def _rows(run_folder: Path) -> Iterator[dict[str, Any]]:
    from megavis.checkpoint.format.folder import latest_checkpoint, step_folder
    from megavis.checkpoint.format.manifest import read_manifest

    latest = latest_checkpoint(run_folder)
    for step in _steps(run_folder):
        folder = step_folder(run_folder, step)
        row = {"step": step, "bytes": 0, "layout": "", "problem": "", "is_latest": folder == latest}
        row["bytes"] = sum(file.stat().st_size for file in folder.iterdir())
        try:
            manifest = read_manifest(folder)
        except UserError as error:
            yield {**row, "problem": str(error)}
            continue
        sizes = [manifest.layout.get(f"{name}_parallel_size", 1) for name in _AXES]
        row["layout"] = "-".join(
            f"{short}{size}" for short, size in zip(("tp", "pp", "dp"), sizes, strict=True)
        )
        for name, stored in manifest.files.items():
            path = folder / name
            if not path.is_file() or path.stat().st_size != stored.size:
                row["problem"] = f"{name} is missing or cut off"
        yield row


_AXES = ("tensor_model", "pipeline_model", "data")


def _verify(args: argparse.Namespace) -> int:
    """Write what is damaged; returns 2 where anything is."""
    from megavis.checkpoint.format.folder import step_folder
    from megavis.checkpoint.state.verify import damages

    steps = _steps(args.run_folder)
    if args.step is not None:
        steps = [_one(args.run_folder, args.step)]
    damaged = 0
    for step in steps:
        found = list(damages(step_folder(args.run_folder, step)))
        damaged += bool(found)
        sys.stdout.write(
            f"step {step}: {'DAMAGED' if found else 'every byte is as it was saved'}\n"
        )
        sys.stdout.writelines(f"  {text}\n" for text in found)
    return 2 if damaged else 0


def _one(run_folder: Path, step: int | None) -> int:
    steps = _steps(run_folder)
    if step is None:
        return steps[-1]
    if step not in steps:
        known = ", ".join(map(str, steps))
        raise UserError(f"--step: {run_folder} has no checkpoint of step {step}; it has {known}")
    return step


def _prune(args: argparse.Namespace) -> int:
    """Delete, and say what stays."""
    from megavis.checkpoint.format.folder import prune

    before = _steps(args.run_folder)
    prune(args.run_folder, keep_last=args.keep_last, keep_every=args.keep_every)
    after = _steps(args.run_folder)
    kept = ", ".join(map(str, after))
    sys.stdout.write(f"deleted {len(before) - len(after)} of {len(before)}; kept {kept}\n")
    return 0


def _convert(args: argparse.Namespace) -> int:
    """Write the checkpoint into another run folder, with the run's config."""
    import shutil

    from megavis.checkpoint.format.folder import step_folder
    from megavis.commands.quiet import quietly

    source = step_folder(args.run_folder, _one(args.run_folder, args.step))
    with quietly():
        from megavis.checkpoint.state.convert import convert

    written = convert(source, args.target, tensor_size=args.tensor, data_size=args.data)
    for file in args.run_folder.iterdir():
        if file.name in ("config.yaml", "palette.npy") and not (args.target / file.name).exists():
            shutil.copyfile(file, args.target / file.name)
    sys.stdout.write(f"{written}\n")
    return 0
