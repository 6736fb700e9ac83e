"""`megavis search-lr` and `megavis sweep`: train and compare several runs of one config."""

from __future__ import annotations

import argparse
import gc
import math
import os
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from megavis.checkpoint.format.folder import finetuning_file
from megavis.commands.config import load_user_config
from megavis.commands.figure import save_figure
from megavis.commands.opening import (
    feature_cache,
    first_images,
    job_closed,
    network_of,
    open_run,
    open_shards,
)
from megavis.config.errors import UserError
from megavis.config.load import LoadedConfig
from megavis.data.loading.leakage import training_shards
from megavis.evaluation.probe import ProbeData, ProbeSettings, score_best_layer
from megavis.evaluation.results import ClassAccuracy, FinetuneResult, SweepScore
from megavis.notebook import Run
from megavis.parallel.launch import read_launch
from megavis.training.faults.interruption import forgiving_messages
from megavis.training.job import open_job
from megavis.training.metrics import read_metrics
from megavis.training.search.learning_rate import (
    PAPER_RATES,
    TrialResult,
    best_of,
    markdown_of,
    search_rates,
    write_search,
)
from megavis.training.search.sweep import (
    Point,
    is_of_architecture,
    plot_sweep,
    points_of,
    rows_of,
    train_run,
)

_MEASURES = {
    "probe": "accuracy of a linear probe",
    "accuracy": "validation accuracy",
    "test": "accuracy on test images",
    "loss": "validation loss",
}


@forgiving_messages()
def search_rate(args: argparse.Namespace) -> int:
    """Search; return 1 if no run finished."""
    loaded = args.loaded
    with open_job(loaded.config, read_launch(os.environ), device=args.device) as context:
        is_main = context.is_main
        outcomes = search_rates(
            loaded.config,
            args.rates or PAPER_RATES,
            context,
            patience=args.patience,
            report=_tell if is_main else lambda _: None,
        )
    best = best_of(outcomes)
    if is_main:
        sys.stdout.write(f"\n{markdown_of(outcomes)}\n")
        folder = Path(loaded.config.output) / f"{loaded.config.name}-search"
        for path in write_search(folder, outcomes, name=loaded.config.name):
            sys.stdout.write(f"{path}\n")
    return 0 if best is not None else 1


def _tell(outcome: TrialResult) -> None:
    end = "stopped early" if outcome.state != "finished" else f"loss {outcome.validation_loss:.4f}"
    if outcome.accuracy is not None:
        end += f", accuracy {outcome.accuracy:.4f}"
    sys.stdout.write(f"learning rate {outcome.rate:g}: {end} at step {outcome.step}\n")
    sys.stdout.flush()


@forgiving_messages()
def sweep(args: argparse.Namespace) -> int:
    """Train the selected runs, then plot if this is one process."""
    loads = [partial(_load, args.config, args.overrides)]
    architecture = [word for word in args.overrides if is_of_architecture(word)]
    loads += [partial(_load, path, architecture) for path in args.then or ()]
    points = points_of(args.grid, loads)
    if args.count:
        sys.stdout.write(f"{len(points)}\n")
        return 0
    _check_measure(points, args.measure)
    launch = read_launch(os.environ)
    if not args.plot:
        for point in _chosen(points, args.index):
            _train(point, launch, args)
    if launch.world_size > 1 or (args.index is not None and not args.plot):
        if launch.rank == 0:
            sys.stdout.write("trained; plot with --plot, on one process\n")
        return 0
    return _plot(points, args)


def _check_measure(points: Sequence[Point], measure: str) -> None:
    """Raise UserError if the runs of a grid could not be compared by a measure."""
    if any(run.config.data.validation is None for run in points[0].runs):
        raise UserError("a sweep compares runs on held-out images: set data.validation")
    tuned = points[0].runs[-1].config.finetune
    if measure == "probe" and tuned is not None and not tuned.gives_features:
        text = "--measure probe needs features of whole images, which finetune.task"
        raise UserError(f"{text} {tuned.task} does not give; use accuracy or loss")
    if measure == "test" and (tuned is None or tuned.task != "classes"):
        raise UserError("--measure test needs a last config that fine-tunes on classes")
    last = [point.runs[-1].config.training for point in points]
    if measure in ("accuracy", "loss") and not all(each.validate_every for each in last):
        text = "needs validation during training: set training.validate_every"
        raise UserError(f"--measure {measure} {text}")


def _load(path: str, overrides: Sequence[str], words: Sequence[str]) -> LoadedConfig:
    return load_user_config(path, [*overrides, *words])


def _chosen(points: list[Point], index: int | None) -> list[Point]:
    if index is None:
        return points
    if not 0 <= index < len(points):
        raise UserError(f"--index {index}: the grid has runs 0 to {len(points) - 1}")
    return [points[index]]


def _train(point: Point, launch: Any, args: argparse.Namespace) -> None:
    for loaded in point.runs:
        if launch.rank == 0:
            sys.stdout.write(f"{loaded.config.folder}\n")
            sys.stdout.flush()
        job = open_job(loaded.config, launch, device=args.device)
        with loaded.source.locate(), job as context:
            is_trained = train_run(loaded.config, context)
        # An engine contains reference cycles, and the next one needs its memory.
        gc.collect()
        if not is_trained:
            if launch.rank == 0:
                sys.stdout.write("given up: too many bad steps in a row\n")
            # Nothing starts from its weights.
            return


def _plot(points: Sequence[Point], args: argparse.Namespace) -> int:
    for point in points:
        point.check()
    scores = [_score(point, args) if point.is_finished else math.nan for point in points]
    if all(map(math.isnan, scores)):
        what = _MEASURES[args.measure]
        if any(point.is_finished for point in points):
            raise UserError(f"the finished runs of the grid have no {what}; use another --measure")
        raise UserError("no run of the grid is finished yet, so there is nothing to plot")
    # The grid's name is the common prefix of its runs' names.
    config = points[0].runs[-1].config
    name = config.name.removesuffix(
        "".join(f"-{a.short}-{v}" for a, v in zip(args.grid, points[0].values, strict=True))
    )
    figure = plot_sweep(args.grid, scores, name=name, what=_MEASURES[args.measure])
    folder = Path(config.output) / f"{name}-sweep"
    save_figure(folder, "sweep", figure, rows_of(args.grid, points, scores))
    return 0


def _score(point: Point, args: argparse.Namespace) -> float:
    """Return the point's score; a probe is cached in the run's folder."""
    if args.measure == "test":
        result = FinetuneResult.read(finetuning_file(point.folder))
        assert isinstance(result.accuracy, ClassAccuracy), "other tasks are refused"
        return result.accuracy.vote
    if args.measure != "probe":
        key = f"validation_{args.measure}"
        logged = [record[key] for record in read_metrics(point.folder) if key in record]
        return logged[-1] if logged else math.nan
    kept = point.folder / "evaluation" / "sweep.json"
    if kept.exists():
        known = SweepScore.read(kept)
        if (known.step, known.train_images) == (point.step, args.train_images):
            return known.accuracy
    with job_closed():
        opened = open_run(point.folder, step=point.step, device=args.device)
        accuracy = _probe(opened, args)
    SweepScore(point.step, args.train_images, accuracy).write(kept)
    return accuracy


def _probe(opened: Run, args: argparse.Namespace) -> float:
    config, trained_on = opened.config.data, list(training_shards(opened.config))
    assert config.validation is not None, "a grid without is refused"
    train, validation = (
        open_shards(opened, folder, own_classes=False)
        for folder in (config.train_sources[0].path, config.validation)
    )
    first = first_images(opened, train, args.train_images)
    data = ProbeData(first, validation, num_train=args.train_images, trained_on=trained_on)
    features = data.features(network_of(opened, feature_cache(opened, args)))
    return score_best_layer(features, data, ProbeSettings()).accuracy
