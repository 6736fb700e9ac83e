"""`megavis train` and `megavis finetune`: train a run, or resume it."""

from __future__ import annotations

import argparse
import os
import sys

from megavis.commands.quiet import quietly
from megavis.config.load import LoadedConfig
from megavis.parallel.launch import read_launch
from megavis.training.dry_run import dry_run
from megavis.training.trainer import run_training


def run(args: argparse.Namespace) -> int:
    """Train, or check whether training could start; return 2 if it could not."""
    if args.dry_run:
        return _dry_run(args.loaded, args.processes or 1)
    run_training(args.loaded, read_launch(os.environ), device=args.device)
    return 0


def _dry_run(loaded: LoadedConfig, num_processes: int) -> int:
    """Print a line for each check; return 0 if all pass."""
    with quietly():
        findings = list(dry_run(loaded, num_processes))
    sys.stdout.writelines(f"{finding}\n" for finding in findings)
    return 0 if all(finding.is_right for finding in findings) else 2
