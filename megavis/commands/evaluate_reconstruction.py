"""`megavis evaluate reconstruction`: what a tokenizer loses of held-out images."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megavis.commands.feature_arguments import add_network_arguments, say
from megavis.commands.opening import job_closed, open_run
from megavis.commands.patch_figures import add_image_arguments, held_out_images
from megavis.commands.perceptual import add_perceptual_arguments, open_perceptual
from megavis.config.errors import UserError

if TYPE_CHECKING:
    from megavis.evaluation.images.reconstruction import Distances
    from megavis.notebook import Run


def add_reconstruction(verbs: Any) -> None:
    """Add it to the verbs of `megavis evaluate`."""
    parser = verbs.add_parser(
        "reconstruction",
        help="PSNR, SSIM, LPIPS and FID of what comes out of a tokenizer",
        description="Send held-out images through a tokenizer and compare what comes out: PSNR in"
        " dB and SSIM (Gaussian window of 11×11 pixels), the means over the images; LPIPS and FID"
        " with the user's weights. Writes RUN/evaluation/reconstruction.json.",
        epilog="example: megavis evaluate reconstruction runs/vae --num-images 50000",
    )
    add_image_arguments(parser, num_images=5000)
    add_perceptual_arguments(parser)
    add_network_arguments(parser)
    parser.set_defaults(run=evaluate_reconstruction)


def evaluate_reconstruction(args: argparse.Namespace) -> int:
    """Reconstruct, compare and write.

    Raises:
        UserError: the run, its data or its objective does not allow it.
    """
    with job_closed():
        opened = open_run(args.run_folder, step=args.step, device=args.device)
        return _evaluate(opened, args)


def _evaluate(opened: Run, args: argparse.Namespace) -> int:
    from megavis.evaluation.images.reconstruction import PairScores, reconstructions

    if not opened.objective.reconstructs:
        raise UserError(f"{opened.config.objective.name} does not reconstruct images")
    dataset = held_out_images(opened, args)
    count = min(args.num_images, len(dataset))
    scores, distances = PairScores(open_perceptual(args)), _distances(opened, args, count)
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
    _write(args.run_folder / "evaluation" / "reconstruction.json", result)
    return 0


def _distances(opened: Run, args: argparse.Namespace, count: int) -> Distances | None:
    """Return what compares features, where the options name a network."""
    from megavis.evaluation.images.feature_networks import open_network
    from megavis.evaluation.images.reconstruction import Distances

    if args.inception is None and args.network is None:
        return None
    network = open_network(args.inception, args.network, opened.context.device)
    return Distances(network, num_images=count)


def _write(path: Path, result: dict[str, Any]) -> None:
    from megavis.data.format.files import write_atomically

    path.parent.mkdir(exist_ok=True)
    write_atomically(path, (json.dumps(result, indent=2) + "\n").encode())
    sys.stdout.write(f"{path}\n")
