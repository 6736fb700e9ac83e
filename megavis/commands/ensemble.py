"""`megavis ensemble`: several fine-tuned runs together on the same held-out images."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megavis.commands.arguments import add_device, add_runs
from megavis.config.errors import UserError

if TYPE_CHECKING:
    from megavis.data.loading.subset import Subset
    from megavis.evaluation.ensemble import ClassProbabilities
    from megavis.notebook import Run


def add_parser(subparsers: Any) -> None:
    """Add the command to the parser."""
    parser = subparsers.add_parser(
        "ensemble",
        help="average the class probabilities of fine-tuned runs",
        description="Average the class probabilities of several fine-tuned runs, each at the step"
        " that it chose, and print the accuracy of each and of all together. The runs may be of"
        " different papers; their held-out shards must hold the same images.",
        epilog="example: megavis ensemble runs/one_finetuned runs/another_finetuned",
    )
    add_runs(parser, text="two or more")
    parser.add_argument(
        "--images",
        metavar="FOLDER",
        help="shard folder; default: the images that judged each run (finetune.test, or the half of"
        " data.validation that chose nothing)",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the numbers here")
    add_device(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Ask each run, then all together.

    Raises:
        UserError: a run is not fine-tuned, or the runs do not know the same images.
    """
    if len(args.run_folders) < 2:
        raise UserError("name two or more run folders")
    from megavis.commands.opening import job_closed

    members: dict[str, ClassProbabilities] = {}
    sources = set()
    with job_closed():
        for folder in args.run_folders:
            found, source = _ask(folder, args)
            members[str(folder)] = found
            sources.add(source)
    if len(sources) > 1:
        raise UserError("the runs were judged by different images; name one folder with --images")
    from megavis.evaluation.ensemble import average

    try:
        members["together"] = average(list(members.values()))
    except ValueError as error:
        raise UserError(f"{error}: their shards are in different orders") from None
    _report(members, args.json)
    return 0


def _ask(folder: Path, args: argparse.Namespace) -> tuple[ClassProbabilities, str]:
    """Return what a run says, and which images it was asked about."""
    from megavis.commands.opening import open_run

    opened = open_run(folder, step=_chosen_step(folder), device=args.device)
    from megavis.evaluation.ensemble import predict_classes

    objective = opened.objective.classification()
    assert objective is not None, "the run has a chosen step, so it was fine-tuned"
    dataset = _judges(opened, args.images)
    return predict_classes(opened.runner, objective, dataset), dataset.whole.manifest.source.sha256


def _chosen_step(folder: Path) -> int:
    path = folder / "evaluation" / "finetune_test.json"
    try:
        return int(json.loads(path.read_text())["step"])
    except (OSError, ValueError, KeyError):
        raise UserError(
            f"{folder} is not a finished fine-tuning run: {path} does not say which step it chose"
        ) from None


def _judges(opened: Run, images: str | None) -> Subset:
    """Return the labelled images that a run is asked about."""
    from megavis.commands.opening import open_shards
    from megavis.data.loading.subset import halves, shuffled

    settings = opened.config.finetune
    assert settings is not None
    folder = images or settings.test
    if folder is not None:
        return shuffled(open_shards(opened, folder))
    assert opened.config.data.validation is not None
    return halves(open_shards(opened, opened.config.data.validation))[1]


def _report(members: dict[str, ClassProbabilities], path: Path | None) -> None:
    rows = [
        {"run": name, "top1": found.share_right(1), "top5": found.share_right(5)}
        for name, found in members.items()
    ]
    width = max(len(name) for name in members)
    for row in rows:
        sys.stdout.write(
            f"{row['run']:<{width}}  top-1 {row['top1']:.1%}  top-5 {row['top5']:.1%}\n"
        )
    if path is not None:
        count = len(next(iter(members.values())).labels)
        path.write_text(json.dumps({"num_images": count, "rows": rows}, indent=2) + "\n")
