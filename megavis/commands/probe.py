"""`megavis probe`: linear probe of a run, of raw pixels and of untrained networks."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator

from megavis.commands.features import feature_job, probe_run, read_layers
from megavis.commands.opening import open_run
from megavis.evaluation.concatenation import ConcatenatedScore
from megavis.evaluation.linear import RECIPES, LayerScore
from megavis.evaluation.probe import ProbeSettings
from megavis.evaluation.probe_result import ProbeResult


def run(args: argparse.Namespace) -> int:
    """Probe, write the result as JSON and as a table."""
    with feature_job(args):
        opened = open_run(args.run_folder, step=args.step, precision=args.precision)
        settings = ProbeSettings(
            layers=read_layers(args.layers, opened.config.model.num_layers),
            seed=args.seed,
            concatenate=args.concatenate,
            images_per_class=args.images_per_class,
            draws=args.draws,
            recipe=RECIPES[args.classifier],
        )
        result = probe_run(opened, args, settings)
    if result is None:
        return 0
    out = args.out or opened.folder / "evaluation" / "probe.json"
    result.write(out)
    sys.stdout.write(table(result) + f"{out}\n")
    return 0


def table(result: ProbeResult) -> str:
    """Return the accuracies as lines of text, the best layer marked."""
    networks = len(result.untrained)
    lines = [
        f"linear probe at step {result.step}: {result.num_classes} classes,"
        f" {result.num_fitted} + {result.num_held_out} training images,"
        f" {result.num_validation} validation images, seed {result.seed},"
        f" {networks} untrained networks",
        f"{'layer':>9}{'trained':>10}{'untrained':>11}" + "   vote" * (result.num_views > 1),
    ]
    for trained, *untrained in zip(result.trained, *result.untrained, strict=True):
        mark = "  <- best on held-out training images" if trained == result.best else ""
        mean = sum(score.accuracy for score in untrained) / networks
        lines.append(
            f"{trained.layer:>9}{trained.accuracy:>10.1%}{mean:>11.1%}{_vote(trained)}{mark}"
        )
    lines += [*_concatenated(result), *_low_data(result), _summary(result)]
    return "\n".join(lines) + "\n"


def _vote(score: LayerScore | ConcatenatedScore) -> str:
    return "" if score.vote_accuracy is None else f"{score.vote_accuracy:>7.1%}"


def _summary(result: ProbeResult) -> str:
    best = result.best
    vote = (
        ""
        if best.vote_accuracy is None
        else f" ({best.vote_accuracy:.1%} by the vote of {result.num_views} masks)"
    )
    return (
        f"best layer {best.accuracy:.1%}{vote}, raw pixels {result.pixels.accuracy:.1%},"
        f" untrained network {result.untrained_accuracy:.1%}"
    )


def _concatenated(result: ProbeResult) -> Iterator[str]:
    if not result.concatenated:
        return
    trained, *untrained = result.concatenated
    mean = sum(score.accuracy for score in untrained) / len(untrained)
    layers = f"{trained.layers[0]}-{trained.layers[-1]}"
    yield (
        f"{layers:>9}{trained.accuracy:>10.1%}{mean:>11.1%}{_vote(trained)}"
        f"  {trained.num_features} features concatenated"
    )


def _low_data(result: ProbeResult) -> Iterator[str]:
    """Yield a line per number of labels: mean ± standard deviation for each kind of features."""
    if not result.low_data:
        return
    kinds = ("trained", "untrained", "pixels")
    draws = len(result.low_data[0].accuracies)
    yield f"few labels, mean ± standard deviation over {draws} draws:"
    yield f"{'per class':>9}" + "".join(f"{kind:>16}" for kind in kinds)
    for count in dict.fromkeys(score.images_per_class for score in result.low_data):
        scores = {s.features: s for s in result.low_data if s.images_per_class == count}
        cells = [f"{scores[kind].mean:.1%} ± {scores[kind].deviation:.1%}" for kind in kinds]
        yield f"{count:>9}" + "".join(f"{cell:>16}" for cell in cells)
