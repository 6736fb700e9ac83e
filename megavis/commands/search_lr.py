"""`megavis search-lr`: learning rates from large to small, until the validation loss rises."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megavis.commands.arguments import add_config, add_device, read_config
from megavis.config.arguments import positive

if TYPE_CHECKING:
    from megavis.training.search.learning_rate import TrialResult


def add_parser(subparsers: Any) -> None:
    """Add the command to the parser."""
    parser = subparsers.add_parser(
        "search-lr",
        help="try learning rates from large to small",
        description="Train the config with one learning rate after the other, from large to small,"
        " and stop once the final validation loss starts to rise (iGPT, section 3.4), or in"
        " fine-tuning the best validation accuracy to fall. A run whose"
        " loss goes up and stays up is given up early. Each rate has a run folder of its own,"
        " NAME-lr-RATE; a search that was interrupted goes on. Table and picture lie in"
        " NAME-search. Alone, or under deepspeed, torchrun or srun.",
        epilog="example: megavis search-lr yaml_configs/igpt/demo.yaml --rates 1e-2,3e-3,1e-3",
    )
    add_config(parser)
    parser.add_argument(
        "--rates",
        type=_rates,
        metavar="R,R,…",
        help="default: 0.01,0.003,0.001,0.0003,0.0001, as the paper",
    )
    parser.add_argument(
        "--patience",
        type=positive,
        default=10,
        help="a run is given up when so many logged losses in a row are up",
    )
    add_device(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Search; returns 1 where no run finished.

    Raises:
        UserError: the config is wrong, or has no validation data.
    """
    from megavis.commands.quiet import quietly

    loaded = read_config(args)
    with quietly():
        from megavis.parallel.launch import read_launch
        from megavis.training.job import open_job
        from megavis.training.search.learning_rate import PAPER_RATES, best_of, search_rates
        from megavis.training.search.table import markdown_of, write_search

    with open_job(loaded, read_launch(os.environ), device=args.device) as context:
        is_main = context.is_main
        outcomes = search_rates(
            loaded,
            args.rates or PAPER_RATES,
            context,
            patience=args.patience,
            report=_tell if is_main else _say_nothing,
        )
    best = best_of(outcomes)
    if is_main:
        sys.stdout.write(f"\n{markdown_of(outcomes)}\n")
        folder = Path(loaded.config.output) / f"{loaded.config.name}-search"
        for path in write_search(folder, outcomes, name=loaded.config.name):
            sys.stdout.write(f"{path}\n")
    return 0 if best is not None else 1


def _rates(text: str) -> list[float]:
    try:
        return [float(word) for word in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"'{text}' is not a list of numbers, for example 1e-2,3e-3"
        ) from None


def _tell(outcome: TrialResult) -> None:
    end = "given up" if outcome.state != "finished" else f"loss {outcome.validation_loss:.4f}"
    if outcome.accuracy is not None:
        end += f", accuracy {outcome.accuracy:.4f}"
    sys.stdout.write(f"learning rate {outcome.rate:g}: {end} at step {outcome.step}\n")
    sys.stdout.flush()


def _say_nothing(_: TrialResult) -> None:
    pass
