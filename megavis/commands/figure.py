"""`megavis figure`: figures of a run's features and predictions."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from matplotlib.figure import Figure

from megavis.checkpoint.format.folder import saved_steps
from megavis.commands.opening import (
    feature_cache,
    first_images,
    job_closed,
    layout_job,
    network_of,
    open_held_out,
    open_run,
    open_shards,
    open_unseen,
    probe_data,
    probe_run,
    report_cache,
)
from megavis.commands.options.evaluation import GENERAL_FIGURES
from megavis.commands.options.shared import result_place, spelled
from megavis.commands.probe import table
from megavis.commands.terminal import quietly
from megavis.composition.finetuned import finetuned_of
from megavis.composition.model import generator_of, model_of
from megavis.composition.trainable import Trainable
from megavis.config.errors import UserError
from megavis.config.load import load_run_config
from megavis.config.papers import FigureSpec, paper_figures
from megavis.data.loading.labels import check_numbering
from megavis.data.loading.leakage import check_no_overlap, training_shards
from megavis.data.loading.loader import read_round_robin
from megavis.evaluation import classes, figures
from megavis.evaluation.classes import NeighborAccuracy
from megavis.evaluation.figures import FigureInput, RenderedFigure, Row, write_png, write_table
from megavis.evaluation.images.pair_metrics import count_rows, score_completions
from megavis.evaluation.linear import RECIPES
from megavis.evaluation.probe import (
    CheckpointScore,
    ProbeSettings,
    score_best_layer,
    score_checkpoint,
)
from megavis.evaluation.results import ProbeResult
from megavis.evaluation.token_relations import has_features
from megavis.notebook import Run
from megavis.sampling.pictures import completion_grid, pixels_of, save_png
from megavis.sampling.sampler import Sampler


def plot_depth(args: argparse.Namespace) -> int:
    """Probe every layer, or read a probe, and plot."""
    result = _depth_result(args)
    if result is None:
        return 0
    picture = figures.plot_depth(result, name=args.run_folder.name)
    folder = result_place(args)
    save_figure(folder, args.name, picture, figures.depth_rows(result))
    if args.probe is None:
        result.write(folder / f"{args.name}.json")
    if args.out is None:
        with quietly():
            figures.show_in_tensorboard(args.run_folder, args.name, picture, step=result.step)
    return 0


def _depth_result(args: argparse.Namespace) -> ProbeResult | None:
    if args.probe is not None:
        return _probe_of(args.run_folder, args.probe)
    with layout_job(args):
        opened = open_run(args.run_folder, step=args.step, precision=args.precision)
        check_applies("depth", opened)
        result = probe_run(opened, args, _probe_settings(args))
    if result is not None:
        sys.stdout.write(table(result))
    return result


def _probe_of(run_folder: Path, path: Path) -> ProbeResult:
    """Read the result of a probe. Raises UserError if it is another run's."""
    config, result = load_run_config(run_folder), ProbeResult.read(path)
    if result.run not in (None, config.name):
        raise UserError(f"--probe {path}: this is a probe of {result.run}, not of {config.name}")
    last, num_layers = result.trained[-1].layer, config.model.num_layers
    if last > num_layers:
        raise UserError(f"--probe {path}: it has a layer {last}; {config.name} has {num_layers}")
    return result


def _probe_settings(args: argparse.Namespace) -> ProbeSettings:
    return ProbeSettings(seed=args.seed, recipe=RECIPES[args.classifier])


def plot_likelihood(args: argparse.Namespace) -> int:
    """Score every checkpoint of every run and plot."""
    with layout_job(args, alone=True):
        scores = [score for folder in args.run_folders for score in _scores(folder, args)]
        data = probe_data(open_run(args.run_folders[0], step=None), args)
        pixels = score_best_layer(data.pixels(), data, _probe_settings(args))
    sys.stdout.write(f"raw pixels {pixels.accuracy:.1%}\n")
    picture = figures.plot_likelihood(scores, pixels=pixels.accuracy)
    save_figure(result_place(args), args.name, picture, [vars(score) for score in scores])
    return 0


def _scores(folder: Path, args: argparse.Namespace) -> Iterator[CheckpointScore]:
    """Yield and print the score of each checkpoint of a run."""
    steps = saved_steps(folder)
    if not steps:
        raise UserError(f"{folder} has no checkpoint yet")
    for step in steps:
        opened = open_run(folder, step=step, precision=args.precision)
        check_applies("likelihood", opened)
        cache = feature_cache(opened, args)
        # Labelled if the run reads classes.
        own = args.loss_images or opened.config.data.validation or args.validation
        loss_images = open_unseen(opened, own, option="--loss-images")
        score = score_checkpoint(
            opened.config.name,
            step,
            network_of(opened, cache),
            probe_data(opened, args),
            _probe_settings(args),
            loss_images=first_images(opened, loss_images, args.num_loss_images),
            num_loss_images=args.num_loss_images,
        )
        sys.stdout.write(
            f"{score.run} step {step}: validation loss {score.validation_loss:.4f},"
            f" best layer {score.layer} {score.accuracy:.1%}\n"
        )
        report_cache(cache)
        sys.stdout.flush()
        yield score


def plot_completions(args: argparse.Namespace) -> int:
    """Complete lower halves, compare and plot."""
    with job_closed():
        opened = open_run(args.run_folder, step=args.step, device=args.device)
        check_applies("completions", opened)
        complete(opened, args)
    return 0


def complete(opened: Run, args: argparse.Namespace) -> None:
    """Complete lower halves with an opened run; see `plot_completions`."""
    options = {"sampling_steps": args.sampling_steps, "temperature": args.temperature}
    sampler = opened.sampler(seed=args.seed, spell=spelled, **options)
    dataset = open_unseen(opened, args.images, option="--images", own_classes=False)
    inputs = read_round_robin(dataset, args.num_images).inputs.to(opened.context.device)
    count, num_given = len(inputs), sampler.model.num_tokens // 2
    draws = max(args.draws, args.completions)
    tokens = sampler.sample(count * draws, originals=inputs, num_given=num_given)
    completed = sampler.to_images(tokens).unflatten(0, (draws, count))
    originals = sampler.to_images(sampler.model.tokens_of(inputs))
    shown = [images.cpu().numpy() for images in (originals, *completed[: args.completions])]
    given = pixels_of(sampler.given_part(count, num_given), sampler.model.predicts.grid, shown[0])
    scores = score_completions(originals, completed[: args.draws], torch.from_numpy(given))
    first, *columns = (images[:8] for images in shown)
    sys.stdout.write(
        f"PSNR of the lower halves of {count} images: completed {scores.completed:.2f} dB,"
        f" mean of {args.draws} completions {scores.mean:.2f} dB,"
        f" last row repeated {scores.repeated:.2f} dB\n"
    )
    picture = completion_grid(first, given[:8], columns)
    rows = [row.record() for row in scores.rows]
    save_figure(result_place(args), "completions", picture, rows)


def plot_neighbors(args: argparse.Namespace) -> int:
    """Classify by the nearest neighbors in each layer and plot."""
    with layout_job(args, alone=True):
        opened = open_run(args.run_folder, step=args.step, precision=args.precision)
        check_applies("neighbors", opened)
        scores, record = _neighbor_scores(opened, args)
    best = max(scores, key=lambda score: score.trained)
    line = (
        f"{record['num_held_out']} held-out images by {record['num_train']} training images, the"
        f" {args.neighbors} nearest vote: last layer {scores[-1].trained:.1%}, untrained"
        f" {scores[-1].untrained:.1%}; highest, chosen on these images, at layer {best.layer}:"
        f" {best.trained:.1%}, untrained there {best.untrained:.1%}"
    )
    picture = classes.plot_neighbors(scores, name=args.run_folder.name, k=args.neighbors)
    rows = [{**asdict(score), **record} for score in scores]
    sys.stdout.write(f"{line}\n")
    save_figure(result_place(args), "neighbors", picture, rows)
    return 0


def _neighbor_scores(
    opened: Run, args: argparse.Namespace
) -> tuple[list[NeighborAccuracy], dict[str, Any]]:
    """Return a score per layer, and a record for reproducing them."""
    held_out = open_held_out(opened, args.images, option="--images", own_classes=False)
    train = open_shards(opened, opened.config.data.train_sources[0].path, own_classes=False)
    names, place = (held_out.class_names, train.class_names), str(train.directory)
    check_numbering(held_out.directory, *names, source=place, folder=place, may_lack_last=True)
    check_no_overlap(held_out, [train, *training_shards(opened.config)])
    cache = feature_cache(opened, args)
    fresh = network_of(opened, cache, seed=opened.config.seed)
    known = first_images(opened, train, args.train_images)
    asked = first_images(opened, held_out, args.num_images)
    pairs = [
        (
            network.features(known, limit=args.train_images),
            network.features(asked, limit=args.num_images),
        )
        for network in (network_of(opened, cache), fresh)
    ]
    report_cache(cache)
    columns = [classes.accuracy_by_layer(*pair, k=args.neighbors) for pair in pairs]
    record = {
        "step": opened.step,
        "seed": opened.config.seed,
        "neighbors": args.neighbors,
        "train": train.directory,
        "held_out": held_out.directory,
        "num_train": len(pairs[0][0].labels),
        "num_held_out": len(pairs[0][1].labels),
    }
    layers = enumerate(zip(*columns, strict=True))
    return [NeighborAccuracy(layer, *pair) for layer, pair in layers], record


def plot_declared(args: argparse.Namespace) -> int:
    """Plot a figure declared by a paper or `GENERAL_FIGURES`."""
    with job_closed():
        opened = open_run(args.run_folder, step=args.step, device=args.device)
        check_applies(args.spec.name, opened)
        plot_of(opened, args)
    return 0


def plot_of(opened: Run, args: argparse.Namespace) -> None:
    """Plot a declared figure of an opened run; see `plot_declared`."""
    spec: FigureSpec = args.spec
    images = open_unseen(opened, args.images, option="--images", own_classes=spec.reads_classes)
    subject = FigureInput(opened.folder, opened.objective, opened.inference, images)
    plot = _function(spec, spec.plot.partition(":")[2])
    figure: RenderedFigure = plot(subject, args)
    sys.stdout.writelines(f"{line}\n" for line in figure.lines)
    save_figure(result_place(args), spec.name, figure.picture, figure.rows)


def check_applies(name: str, opened: Run) -> None:
    """Raise UserError if this figure does not apply to a run; the message lists those that do."""
    if (reason := _reason_against(name, opened)) is not None:
        those = ", ".join(figures_of(opened)) or "none"
        raise UserError(f"{name}: {reason}; figures of this run are: {those}")


def figures_of(opened: Run) -> list[str]:
    """Return the names of the figures that apply to a run."""
    return [name for name in (*_APPLY, *_declared()) if _reason_against(name, opened) is None]


def _declared() -> dict[str, FigureSpec]:
    return {spec.name: spec for spec in (*GENERAL_FIGURES, *paper_figures())}


def _reason_against(name: str, opened: Run) -> str | None:
    """Return why the figure does not apply to a run; None if it does."""
    spec = _declared().get(name)
    is_papers = spec is not None and spec not in GENERAL_FIGURES
    if is_papers and finetuned_of(opened.objective) is not None:
        return "shows a paper's predictions; take the run that this one started from"
    if spec is None:
        applies, decodes = _APPLY[name]
    else:
        applies, decodes = _function(spec, spec.applies), spec.decodes
    try:
        if applies(opened.objective):
            if decodes:
                model_of(opened.objective).check_images(opened.folder)
            return None
    except UserError as error:
        return str(error)
    return f"does not apply to runs of {opened.config.objective.name}"


def _function(spec: FigureSpec, name: str) -> Callable[..., Any]:
    module = spec.plot.partition(":")[0]
    found: Callable[..., Any] = getattr(importlib.import_module(module), name)
    return found


def _completes_rows(objective: Trainable) -> bool:
    """Return whether images can be continued.

    Raises:
        UserError: the first half of an order is not the upper half of the image.
    """
    model = generator_of(objective)
    if not model.schedule.takes_given or model.has_transform or "image" in model.condition.names:
        return False
    order = model.schedule.order_of(torch.arange(2), seed=0)
    given = Sampler.given_part_of(order, model.num_tokens // 2)
    count_rows(given.unflatten(1, model.predicts.grid))
    return True


# Like `FigureSpec.applies` and `decodes`, for the figures that have commands of their own.
_APPLY: Mapping[str, tuple[Callable[[Trainable], bool], bool]] = {
    "depth": (has_features, False),
    "likelihood": (has_features, False),
    "completions": (_completes_rows, True),
    "neighbors": (has_features, False),
}


def save_figure(folder: Path, name: str, picture: Figure | np.ndarray, rows: Sequence[Row]) -> None:
    """Write `name.png`, and `name.csv` if there are rows; print a line for each."""
    path = folder / f"{name}.png"
    if isinstance(picture, np.ndarray):
        save_png(path, picture)
    else:
        write_png(path, picture)
    sys.stdout.write(f"{path}\n")
    if rows:
        sys.stdout.write(f"{write_table(folder / f'{name}.csv', rows)}\n")
