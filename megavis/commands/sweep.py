"""`megavis sweep`: a grid over two keys as ordinary runs, and one heat-map of them."""

from __future__ import annotations

import argparse
import gc
import json
import math
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megavis.commands.arguments import add_config, add_device, load_user_config
from megavis.commands.options import refuse_options
from megavis.commands.save_figure import save_figure
from megavis.config.arguments import non_negative, positive
from megavis.config.errors import UserError
from megavis.training.search.axis import SweepAxis

if TYPE_CHECKING:
    from megavis.notebook import Run
    from megavis.training.search.sweep import Point


def add_parser(subparsers: Any) -> None:
    """Add the command to the parser."""
    parser = subparsers.add_parser(
        "sweep",
        help="train a grid over two keys and draw a heat-map",
        description="Train the config with every pair of values of two keys, each pair in a run"
        " folder of its own, and draw one heat-map. Runs that are finished are kept, others go on."
        " Alone, or under deepspeed, torchrun or srun, which share each run; or as a SLURM array,"
        " one run a task (launch/sweep.sh), and at the end once more with --draw.",
        epilog="example: megavis sweep yaml_configs/darl/demo.yaml --grid"
        " objective.noise_a=0.1..10:5 --grid objective.noise_b=0.1..10:5",
    )
    add_config(parser)
    parser.add_argument(
        "--grid",
        action="append",
        required=True,
        type=_axis,
        metavar="KEY=V,V,…|KEY=LOW..HIGH:COUNT",
        help="a key and its values, or a logarithmic grid; say it twice",
    )
    parser.add_argument(
        "--index", type=non_negative, help="train the N-th run alone, counted from 0; default: all"
    )
    parser.add_argument("--count", action="store_true", help="say how many runs there are")
    parser.add_argument("--draw", action="store_true", help="train nothing, draw what is there")
    parser.add_argument(
        "--measure",
        choices=("probe", "loss", "accuracy"),
        default="probe",
        help="accuracy of the best layer's linear probe (default), validation accuracy of a"
        " fine-tuning, or validation loss, which compares nothing where the grid changes the task,"
        " as a noise schedule does",
    )
    parser.add_argument("--train-images", type=positive, default=2000, help="of a probe")
    parser.add_argument(
        "--no-cache",
        action="store_true",
        help="compute a probe's features; default: they are read from and kept in each run's"
        " evaluation/features",
    )
    add_device(parser)
    parser.set_defaults(run=run)


def _axis(text: str) -> SweepAxis:
    try:
        return SweepAxis.parse(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def run(args: argparse.Namespace) -> int:
    """Train what is asked for, then draw where this is one process.

    Raises:
        UserError: a point's config is wrong, or has no validation data.
    """
    from megavis.commands.quiet import quietly
    from megavis.parallel.launch import read_launch

    with quietly():
        from megavis.training.search.sweep import points_of

    points = points_of(
        args.grid,
        lambda words: load_user_config(args.config, [*args.overrides, *words]),
    )
    if args.count:
        sys.stdout.write(f"{len(points)}\n")
        return 0
    if points[0].loaded.config.data.validation is None:
        raise UserError("a sweep compares runs on held-out images: set data.validation")
    if args.measure != "probe":
        refuse_options(args, ("--train-images", "--no-cache"), f"to --measure {args.measure}")
    launch = read_launch(os.environ)
    if not args.draw:
        for point in _chosen(points, args.index):
            _train(point, launch, args)
    if launch.world_size > 1 or (args.index is not None and not args.draw):
        if launch.rank == 0:
            sys.stdout.write("trained; draw with --draw, as one process\n")
        return 0
    return _draw(points, args)


def _chosen(points: list[Point], index: int | None) -> list[Point]:
    if index is None:
        return points
    if not 0 <= index < len(points):
        raise UserError(f"--index {index}: the grid has the runs 0 to {len(points) - 1}")
    return [points[index]]


def _train(point: Point, launch: Any, args: argparse.Namespace) -> None:
    from megavis.training.job import open_job
    from megavis.training.search.sweep import train_point

    if launch.rank == 0:
        sys.stdout.write(f"{point.folder}\n")
        sys.stdout.flush()
    with open_job(point.loaded, launch, device=args.device) as context:
        train_point(point, context)
    # An engine lies in cycles of references, and the next one needs its memory.
    gc.collect()


def _draw(points: Sequence[Point], args: argparse.Namespace) -> int:
    from megavis.training.search.sweep import draw_sweep, rows_of

    scores = [_score(point, args) if point.is_finished else math.nan for point in points]
    if all(map(math.isnan, scores)):
        raise UserError("no run of the grid is finished yet, so there is nothing to draw")
    # The grid's name is what all its runs' names begin with.
    config = points[0].loaded.config
    name = config.name.removesuffix(
        "".join(f"-{a.short}-{v}" for a, v in zip(args.grid, points[0].values, strict=True))
    )
    what = "accuracy of a linear probe" if args.measure == "probe" else f"validation {args.measure}"
    figure = draw_sweep(args.grid, scores, name=name, what=what)
    folder = Path(config.output) / f"{name}-sweep"
    save_figure(folder, "sweep", figure, rows_of(args.grid, points, scores))
    return 0


def _score(point: Point, args: argparse.Namespace) -> float:
    """Return the point's score; a probe is kept in the run's folder."""
    from megavis.commands.opening import job_closed, open_run
    from megavis.data.format.files import write_atomically
    from megavis.training.metrics import read_metrics

    if args.measure != "probe":
        key = f"validation_{args.measure}"
        logged = [record[key] for record in read_metrics(point.folder) if key in record]
        return logged[-1] if logged else math.nan
    kept = point.folder / "evaluation" / "sweep.json"
    asked = {"step": point.step, "train_images": args.train_images}
    if kept.exists():
        record = json.loads(kept.read_text(encoding="utf-8"))
        if {key: record[key] for key in asked} == asked:
            return float(record["accuracy"])
    with job_closed():
        opened = open_run(point.folder, step=None, device=args.device)
        accuracy = _probe(opened, args)
    kept.parent.mkdir(exist_ok=True)
    write_atomically(kept, json.dumps({**asked, "accuracy": accuracy}).encode())
    return accuracy


def _probe(opened: Run, args: argparse.Namespace) -> float:
    from megavis.commands.networks import feature_cache, network_of
    from megavis.commands.opening import open_shards
    from megavis.evaluation.probe import ProbeData, ProbeSettings, score_best_layer

    config = opened.config.data
    assert config.validation is not None, "a grid without is refused"
    train, validation = (
        open_shards(opened, folder) for folder in (config.train_sources[0].path, config.validation)
    )
    data = ProbeData(train, validation, num_train=args.train_images)
    features = data.features(network_of(opened, feature_cache(opened, args)))
    return score_best_layer(features, data, ProbeSettings()).accuracy
