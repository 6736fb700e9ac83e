"""`megavis finetune`: train a network on classes, from another run's weights or from scratch."""

from __future__ import annotations

import argparse
import os
from typing import Any

from megavis.commands.arguments import add_config, add_device, read_config
from megavis.config.errors import UserError


def add_parser(subparsers: Any) -> None:
    """Add the command to the parser."""
    parser = subparsers.add_parser(
        "finetune",
        help="train a run's weights on classes, or go on with it",
        description="Train all weights of the run that finetune.from_run names on the classes of"
        " the images. The step with the best accuracy on the selection images is kept, and named"
        " by its accuracy on other ones, with a confusion matrix, in RUN/evaluation. Runs alone,"
        " or under torchrun, deepspeed or srun, in any layout.",
        epilog="example: megavis finetune yaml_configs/igpt/finetune_demo.yaml training.steps=100",
    )
    add_config(parser, text="YAML file with a finetune section")
    add_device(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Fine-tune.

    Raises:
        UserError: the config has no finetune section, or is wrong in another way.
    """
    from megavis.commands.quiet import quietly

    loaded = read_config(args)
    with quietly():
        from megavis.parallel.launch import read_launch
        from megavis.training.run import run_training

    if loaded.config.finetune is None:
        raise UserError(
            f"{args.config}: has no finetune section; name the run to start from as"
            " finetune.from_run and the number of classes as finetune.num_classes, or use megavis"
            " train"
        )
    run_training(loaded, read_launch(os.environ), device=args.device)
    return 0
