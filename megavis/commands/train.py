"""`megavis train` and `megavis finetune`."""

from __future__ import annotations

import argparse
import dataclasses
import os
import sys

from megavis.commands.terminal import quietly
from megavis.parallel.launch import read_launch
from megavis.training.dry_run import DryRunCheck, dry_run
from megavis.training.trainer import run_training


def train(args: argparse.Namespace) -> int:
    """Train, or check whether training could start; return 2 if it could not."""
    if not args.dry_run:
        run_training(args.loaded.config, read_launch(os.environ), device=args.device)
        return 0
    with quietly():
        findings = [
            DryRunCheck("config", True, f"{args.loaded.source.path} is legal"),
            *dry_run(args.loaded.config, args.processes or 1),
        ]
    for finding in findings:
        if finding.error is not None:
            located = args.loaded.source.located(finding.error)
            finding = dataclasses.replace(finding, text=str(located))
        sys.stdout.write(f"{finding}\n")
    return 0 if all(finding.is_right for finding in findings) else 2
