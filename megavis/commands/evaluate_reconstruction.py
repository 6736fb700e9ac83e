"""`megavis evaluate reconstruction`: reconstruction error of a tokenizer on held-out images."""

from __future__ import annotations

import argparse
import sys

from megavis.commands.evaluate_samples import say
from megavis.commands.opening import job_closed, open_held_out, open_run
from megavis.config.errors import UserError
from megavis.data.format.files import write_json
from megavis.evaluation.images.feature_networks import open_network
from megavis.evaluation.images.reconstruction import Distances, PairScores, reconstructions
from megavis.model.autoencoder_losses import open_perceptual
from megavis.notebook import Run


def evaluate_reconstruction(args: argparse.Namespace) -> int:
    """Reconstruct, compare and write.

    Raises:
        UserError: the run, its data or its objective does not support it.
    """
    with job_closed():
        opened = open_run(args.run_folder, step=args.step, device=args.device)
        return _evaluate(opened, args)


def _evaluate(opened: Run, args: argparse.Namespace) -> int:
    if not opened.objective.reconstructs:
        raise UserError(f"{opened.config.objective.name} does not reconstruct images")
    dataset = open_held_out(opened, args.images, option="--images")
    count = min(args.num_images, len(dataset))
    scores, distances = (
        PairScores(open_perceptual(args.perceptual_weights, args.lpips_weights)),
        _distances(opened, args, count),
    )
    for pair in reconstructions(opened.runner, opened.objective, dataset, num_images=count):
        scores.add(*pair)
        if distances is not None:
            distances.add(*pair)
    result = {"step": opened.step, "images": count, "of": str(dataset.directory), **scores.means()}
    words = ", ".join(f"{name} {value:.4g}" for name, value in scores.means().items())
    sys.stdout.write(f"{words} | N {count} of {dataset.directory}, step {opened.step}\n")
    if distances is not None:
        compared = distances.result(run=args.run_folder, originals=dataset.directory)
        say(compared.line, compared.caution)
        result["distance"] = compared.record()
    path = args.run_folder / "evaluation" / "reconstruction.json"
    write_json(path, result)
    sys.stdout.write(f"{path}\n")
    return 0


def _distances(opened: Run, args: argparse.Namespace, count: int) -> Distances | None:
    """Return the feature distances, if the options name a network."""
    if args.inception is None and args.network is None:
        return None
    network = open_network(args.inception, args.network, opened.context.device)
    return Distances(network, num_images=count)
