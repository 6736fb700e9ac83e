"""`megavis train`: train a run, or go on with it."""

from __future__ import annotations

import argparse
import os
from typing import Any


def add_parser(subparsers: Any) -> None:
    """Add the command to the parser."""
    parser = subparsers.add_parser(
        "train",
        help="train a run, or go on with it",
        description="Train a run, alone or under deepspeed, torchrun or srun. A run that exists"
        " goes on from its newest checkpoint, in any layout.",
        epilog="example: megavis train yaml_configs/igpt/demo.yaml training.steps=100",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("config", help="YAML file")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="keys to change")
    parser.add_argument("--device", choices=("cpu", "cuda"), help="default: CUDA where there is")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Train."""
    from megavis.commands.quiet import quietly

    with quietly():
        from megavis.config.load import load_config
        from megavis.objectives import objective_configs
        from megavis.parallel.launch import read_launch
        from megavis.training.run import run_training

    loaded = load_config(args.config, args.overrides, objectives=objective_configs())
    run_training(loaded, read_launch(os.environ), device=args.device)
    return 0
