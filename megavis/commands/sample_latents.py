"""`megavis sample` for GIVT: options of its samplers, grids by class, and files for evaluation."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megavis.config.errors import UserError

if TYPE_CHECKING:
    from torch import Tensor

    from megavis.data.batch import Batch
    from megavis.notebook import Run
    from megavis.sampling.latent_pictures import LatentPictures
    from megavis.sampling.npz import Draw


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options to the command's parser."""
    givt = parser.add_argument_group("givt")
    givt.add_argument("--classes", type=_numbers, metavar="C,C,...", help="a row of each")
    givt.add_argument("--per-class", type=int, default=8, help="images of each; default: 8")
    givt.add_argument(
        "--then-classes", type=_numbers, metavar="C,C,...", help="other classes of the lower halves"
    )
    givt.add_argument("--scale", type=float, default=1.0, help="multiplies standard deviations")
    givt.add_argument("--probability", type=float, default=1.0, help="multiplies mixture logits")
    givt.add_argument("--guidance", type=float, default=0.0, help="w of DB-CFG; default: 0")
    givt.add_argument("--beams", type=int, default=1, help="sequences that are kept of each image")
    givt.add_argument("--fans", type=int, default=1, help="candidates for each at every token")
    givt.add_argument("--rounds", type=int, default=16, help="of the masked model; default: 16")
    givt.add_argument(
        "--choice-temperature", type=float, default=35.0, help="of the masked model; default: 35"
    )
    givt.add_argument(
        "--show-rounds", action="store_true", help="a draw from the prior and every round, a row"
    )
    givt.add_argument(
        "--moments",
        action="store_true",
        help="compare the moments of --num-images latents with held-out ones, in RUN/evaluation",
    )


def _numbers(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"'{text}' is no list of classes such as 0,3,7") from None


def picture(opened: Run, args: argparse.Namespace) -> Any:
    """Draw the grid that the options ask for; None where they ask for numbers.

    Raises:
        UserError: the run cannot be sampled so.
    """
    from megavis.sampling.grids import sample_grid

    pictures = _pictures(opened, args)
    if args.moments:
        _compare_moments(opened, args, pictures)
        return None
    labels, columns = _labels(opened, args)
    if args.show_rounds:
        return pictures.rounds(labels)
    later = _later(args, labels)
    images = pictures.shared(labels, later=later, batch_size=args.batch_size)
    if args.guidance and opened.context.is_main:
        acceptance = pictures.sampler.acceptance
        sys.stdout.write(
            f"guidance: {acceptance.rate:.3f} of the proposals accepted, for"
            f" {acceptance.share_found:.2%} of the numbers\n"
        )
    return sample_grid(images, num_columns=columns)


def predictions(opened: Run, args: argparse.Namespace, examples: Batch) -> Any:
    """Draw the grid of what a run that reads images predicts from held-out ones."""
    return _pictures(opened, args).predictions(
        examples, num_drawn=args.completions, batch_size=args.batch_size
    )


def _pictures(opened: Run, args: argparse.Namespace) -> LatentPictures:
    import torch

    from megavis.sampling.densities import TokenChoice
    from megavis.sampling.latent_pictures import LatentPictures
    from megavis.sampling.latents import LatentSampler
    from megavis.sampling.maskgit import MaskGITSchedule

    objective: Any = opened.objective
    choice = TokenChoice(args.scale, args.probability, args.guidance, args.beams, args.fans)
    schedule = MaskGITSchedule(args.rounds, args.choice_temperature)
    sampler = LatentSampler(opened.runner, objective, choice, schedule, seed=args.seed)
    # Refused before any work is done.
    objective.decode(torch.zeros(1, *objective.latent_shape, device=opened.context.device))
    return LatentPictures(sampler)


def _labels(opened: Run, args: argparse.Namespace) -> tuple[Tensor, int]:
    """Return the class of each image, and the columns of the grid."""
    import torch

    from megavis.sampling.latent_pictures import spread_classes

    objective: Any = opened.objective
    if args.classes is None:
        return spread_classes(objective.num_classes, args.num_images), 8
    if args.per_class < 1:
        raise UserError("--per-class must be at least 1")
    labels = torch.tensor(args.classes).repeat_interleave(args.per_class)
    # Refused before any work is done.
    objective.label_rows(labels, len(labels), opened.context.device)
    return labels, args.per_class


def _later(args: argparse.Namespace, labels: Tensor) -> Tensor | None:
    import torch

    if args.then_classes is None:
        return None
    if args.classes is None or len(args.then_classes) != len(args.classes):
        raise UserError("--then-classes wants as many classes as --classes")
    return torch.tensor(args.then_classes).repeat_interleave(args.per_class)


def drawing(opened: Run, args: argparse.Namespace) -> tuple[Draw, Mapping[str, Any]]:
    """Return what draws a run's images by their numbers, and the settings that decide about them.

    Raises:
        UserError: the run cannot be sampled so.
    """
    pictures = _pictures(opened, args)
    objective: Any = opened.objective
    classes = objective.num_classes

    def draw(numbers: Tensor) -> Tensor:
        # Classes take turns, so that any multiple of their number is balanced.
        return pictures.draw(numbers % classes if classes else numbers * 0 - 1, numbers)

    sampler = pictures.sampler
    return draw, {**asdict(sampler.choice), **asdict(sampler.schedule)}


def _compare_moments(opened: Run, args: argparse.Namespace, pictures: LatentPictures) -> None:
    """Compare drawn with held-out latents; as a yardstick also those of training with them."""
    import torch

    from megavis.data.files import write_atomically
    from megavis.data.manifest import MANIFEST_NAME
    from megavis.evaluation.moments import compare, largest_differences
    from megavis.sampling.batches import share_out

    folder = args.images or opened.config.data.validation
    if folder is None:
        raise UserError("the run has no data.validation; name latents shards with --images")
    held_out, labels = _stored_latents(opened, folder, args.num_images)

    def draw(numbers: torch.Tensor) -> torch.Tensor:
        return pictures.sampler.draw(labels[numbers % len(labels)], numbers)

    data = opened.context.data
    drawn = share_out(draw, len(labels), batch_size=args.batch_size, data=data)
    result = {**asdict(pictures.sampler.choice), **compare(drawn.cpu(), held_out)}
    told = {"drawn": result["largest_difference"]}
    trained_on = opened.config.data.train
    if isinstance(trained_on, str) and Path(trained_on, MANIFEST_NAME).exists():
        seen, _ = _stored_latents(opened, trained_on, args.num_images)
        told["of training"] = result["training_difference"] = largest_differences(seen, held_out)
    if opened.context.is_main:
        path = opened.folder / "evaluation" / f"moments-{opened.step:08d}.json"
        path.parent.mkdir(exist_ok=True)
        write_atomically(path, (json.dumps(result, indent=2) + "\n").encode())
        sys.stdout.write(f"{path}\nlargest difference to held-out latents over the channels\n")
        for name, differences in told.items():
            words = ", ".join(f"{moment} {value:.3f}" for moment, value in differences.items())
            sys.stdout.write(f"  {name}: {words}\n")


def _stored_latents(opened: Run, folder: str, count: int) -> tuple[Tensor, Tensor]:
    """Return latents `[b, c, h, w]`, evenly spaced over a shard folder, and their labels."""
    import numpy as np

    from megavis.commands.opening import open_shards
    from megavis.data.loader import read_batch

    objective: Any = opened.objective
    dataset = open_shards(opened, folder)
    places = np.linspace(0, len(dataset) - 1, min(len(dataset), count)).astype(np.int64)
    batch = read_batch(dataset, places, places)
    return objective.latents(batch.inputs, batch.sample_index), batch.labels
