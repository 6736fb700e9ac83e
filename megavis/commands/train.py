"""`megavis train`: train a run, or go on with it."""

from __future__ import annotations

import argparse
import os
import sys
from typing import TYPE_CHECKING, Any

from megavis.commands.arguments import add_config, add_device, read_config
from megavis.config.arguments import positive
from megavis.config.errors import UserError

if TYPE_CHECKING:
    from megavis.config.load import LoadedConfig


def add_parser(subparsers: Any) -> None:
    """Add the command to the parser."""
    parser = subparsers.add_parser(
        "train",
        help="train a run, or go on with it",
        description="Train a run, alone or under deepspeed, torchrun or srun. A run that exists"
        " goes on from its newest checkpoint, in any layout.",
        epilog="example: megavis train yaml_configs/igpt/demo.yaml training.steps=100",
    )
    add_config(parser)
    add_device(parser)
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="look at config, layout, data, disk and checkpoint as a job of --processes would, and"
        " train nothing; exit code 2 where it could not start",
    )
    parser.add_argument(
        "--processes", type=positive, help="of the job that --dry-run looks at; default: 1"
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Train, or look whether one could; returns 2 where one could not."""
    from megavis.commands.quiet import quietly

    if args.processes is not None and not args.dry_run:
        raise UserError(
            "--processes belongs to --dry-run; a job's launcher says how many there are"
        )
    loaded = read_config(args)
    with quietly():
        from megavis.parallel.launch import read_launch
        from megavis.training.run import run_training

    if args.dry_run:
        return _dry_run(loaded, args.processes or 1)
    run_training(loaded, read_launch(os.environ), device=args.device)
    return 0


def _dry_run(loaded: LoadedConfig, num_processes: int) -> int:
    """Print a line for each finding; returns 0 where all are right."""
    from megavis.commands.quiet import quietly

    with quietly():
        from megavis.training.dry_run import dry_run

        findings = list(dry_run(loaded, num_processes))
    sys.stdout.writelines(f"{finding}\n" for finding in findings)
    return 0 if all(finding.is_right for finding in findings) else 2
