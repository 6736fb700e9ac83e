"""`megavis figure neighbors`, `attention` and `correlation`: what a network's tokens hold."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING, Any

from megavis.commands.networks import (
    feature_cache,
    feature_job,
    network_of,
    report_cache,
    untrained_network,
)
from megavis.commands.opening import job_closed, open_run, open_shards, training_shards
from megavis.commands.patch_figures import add_image_arguments, held_out_images
from megavis.commands.probing import add_feature_arguments
from megavis.commands.save_figure import save_figure
from megavis.config.arguments import positive

if TYPE_CHECKING:
    from megavis.evaluation.neighbors import NeighborAccuracy
    from megavis.notebook import Run


def add_token_figures(figures: Any) -> None:
    """Add them to the figures of `megavis figure`."""
    neighbors = figures.add_parser(
        "neighbors",
        help="accuracy of nearest neighbours by layer",
        description="Classify held-out images by the nearest training images among the features of"
        " each layer, of the run and of an untrained network like it.",
        epilog="example: megavis figure neighbors runs/demo --train-images 2000",
    )
    add_image_arguments(neighbors, num_images=1000)
    neighbors.add_argument(
        "--train-images", type=positive, default=5000, help="to compare with, at most"
    )
    neighbors.add_argument("--neighbors", type=positive, default=20, help="nearest ones that vote")
    add_feature_arguments(neighbors)
    neighbors.set_defaults(run=draw_neighbors)
    attention = figures.add_parser(
        "attention",
        help="where each head looks, and how widely",
        description="Average the attention of every head over held-out images by the offset of what"
        " is looked at, and print its entropy.",
        epilog="example: megavis figure attention runs/demo",
    )
    add_image_arguments(attention, num_images=256)
    attention.set_defaults(run=draw_attention)
    correlation = figures.add_parser(
        "correlation",
        help="how alike the last layer's tokens are, by place",
        description="Correlate the last layer's tokens of every two places, within an image and"
        " between two.",
        epilog="example: megavis figure correlation runs/demo",
    )
    add_image_arguments(correlation, num_images=512)
    correlation.set_defaults(run=draw_correlation)


def draw_neighbors(args: argparse.Namespace) -> int:
    """Classify and draw.

    Raises:
        UserError: the run or its data does not allow it.
    """
    from dataclasses import asdict

    with feature_job(args, alone=True):
        opened = open_run(args.run_folder, step=args.step, precision=args.precision)
        from megavis.evaluation import neighbors as measured

        scores, record = _neighbor_scores(opened, args)
    best = max(scores, key=lambda score: score.trained)
    line = (
        f"{record['num_held_out']} held-out images by {record['num_train']} training images, the"
        f" {args.neighbors} nearest vote: highest at layer {best.layer}, {best.trained:.1%},"
        f" untrained there {best.untrained:.1%}, last layer {scores[-1].trained:.1%}"
    )
    picture = measured.draw_neighbors(scores, name=args.run_folder.name, k=args.neighbors)
    rows = [{**asdict(score), **record} for score in scores]
    return _write(args, "neighbors", picture, rows, line)


def _neighbor_scores(
    opened: Run, args: argparse.Namespace
) -> tuple[list[NeighborAccuracy], dict[str, Any]]:
    """Return a score a layer, and what is needed to repeat them."""
    from megavis.data.loading.leakage import refuse_overlap
    from megavis.evaluation import neighbors as measured

    held_out = held_out_images(opened, args)
    train = open_shards(opened, opened.config.data.train_sources[0].path)
    refuse_overlap(held_out, [train, *training_shards(opened)])
    cache = feature_cache(opened, args)
    fresh = untrained_network(opened, cache, seed=opened.config.seed)
    pairs = [
        (
            network.features(train, limit=args.train_images),
            network.features(held_out, limit=args.num_images),
        )
        for network in (network_of(opened, cache), fresh)
    ]
    report_cache(cache)
    columns = [measured.accuracy_by_layer(*pair, k=args.neighbors) for pair in pairs]
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
    return [measured.NeighborAccuracy(layer, *pair) for layer, pair in layers], record


def draw_attention(args: argparse.Namespace) -> int:
    """Average and draw.

    Raises:
        UserError: the run, its data or its attention does not allow it.
    """
    with job_closed():
        opened = open_run(args.run_folder, step=args.step, device=args.device)
        from megavis.evaluation import attention_maps as measured

        maps = measured.measure_attention(
            opened.runner,
            opened.objective,
            held_out_images(opened, args),
            num_images=args.num_images,
        )
    rows = measured.attention_rows(maps)
    low = measured.lowest_entropy(rows)
    line = (
        f"entropy {min(r['entropy'] for r in rows):.2f} to {max(r['entropy'] for r in rows):.2f}"
        f" nats; lowest in layer {low['layer']}, head {low['head']}, which looks"
        f" {low['mean_distance']:.1f} cells far"
    )
    picture = measured.draw_attention(maps, name=args.run_folder.name)
    return _write(args, "attention", picture, rows, line)


def draw_correlation(args: argparse.Namespace) -> int:
    """Correlate and draw.

    Raises:
        UserError: the run or its data does not allow it.
    """
    with job_closed():
        opened = open_run(args.run_folder, step=args.step, device=args.device)
        from megavis.evaluation import correlation as measured

        found = measured.measure_correlations(
            opened.runner,
            opened.objective,
            held_out_images(opened, args),
            num_images=args.num_images,
        )
    within, between = found.means()
    line = f"mean correlation of two places: same image {within:.3f}, two images {between:.3f}"
    picture = measured.draw_correlations(found, name=args.run_folder.name)
    return _write(args, "correlation", picture, measured.correlation_rows(found), line)


def _write(args: argparse.Namespace, name: str, picture: Any, rows: Any, line: str) -> int:
    sys.stdout.write(f"{line}\n")
    save_figure(args.run_folder / "evaluation", name, picture, rows)
    return 0
