"""`megavis evaluate classes`: whether images drawn by class show the class asked for."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megavis.commands.arguments import add_device
from megavis.commands.evaluate_samples import default_output, samples_of
from megavis.commands.feature_arguments import device_of
from megavis.config.arguments import non_negative, positive
from megavis.config.errors import UserError

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from megavis.evaluation.images.image_files import Images, NpzImages, ShardImages

_BATCH_SIZE = 64


def add_classes(verbs: Any) -> None:
    """Add it to the verbs of `megavis evaluate`."""
    parser = verbs.add_parser(
        "classes",
        help="how often a classifier of real images names the class that was asked for",
        description="Fit a small convolutional classifier on labelled images and let it name"
        " samples, whose classes take turns as `megavis sample --npz` draws them; real images that"
        " it has not seen; and these as a tokenizer reconstructs them. Writes"
        " RUN/evaluation/classes.json.",
        epilog="example: megavis evaluate classes runs/givt --train shards/train --images"
        " shards/validation --tokenizer runs/vae",
    )
    parser.add_argument(
        "samples",
        metavar="SAMPLES",
        type=Path,
        help="an .npz of uint8 [N, H, W, 3] in arr_0, or a run folder, whose newest .npz in"
        " RUN/samples is taken",
    )
    parser.add_argument(
        "--train", required=True, type=Path, metavar="FOLDER", help="jpeg shards to fit on"
    )
    parser.add_argument(
        "--images", required=True, type=Path, metavar="FOLDER", help="real images, in jpeg shards"
    )
    parser.add_argument(
        "--tokenizer", type=Path, metavar="RUN", help="reconstruct the real images with it"
    )
    parser.add_argument("--epochs", type=positive, default=5, help="of fitting; default: 5")
    parser.add_argument("--seed", type=non_negative, default=0, help="of the classifier")
    add_device(parser)
    parser.set_defaults(run=evaluate_classes)


def evaluate_classes(args: argparse.Namespace) -> int:
    """Fit, name and write.

    Raises:
        UserError: images or tokenizer cannot be used.
    """
    from megavis.data.format.files import write_atomically
    from megavis.evaluation.images.classifier import class_accuracies, fit_classifier
    from megavis.evaluation.images.image_files import NpzImages, ShardImages

    device, file = device_of(args), samples_of(args.samples)
    samples, train, real = NpzImages(file), ShardImages(args.train), ShardImages(args.images)
    names = _common_classes(train, real)
    images, labels = _labelled(train, device)
    classifier = fit_classifier(
        images, labels, num_classes=len(names), epochs=args.epochs, seed=args.seed
    )
    result = {
        part: class_accuracies(classifier, images, labels, names)
        for part, (images, labels) in _to_name(args, real, samples, len(names), device).items()
    }
    words = (
        f"{100 * share['all']:.1f} % of {share['images']} {part}" for part, share in result.items()
    )
    sys.stdout.write(f"named as their class: {', '.join(words)}\n")
    options = {"train": str(args.train), "real": str(args.images), "drawn": str(file)}
    fitting = {"epochs": args.epochs, "seed": args.seed}
    out = default_output(args.samples, file, "classes")
    out.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(out, (json.dumps({**result, **options, **fitting}, indent=2) + "\n").encode())
    sys.stdout.write(f"{out}\n")
    return 0


def _common_classes(train: ShardImages, real: ShardImages) -> tuple[str, ...]:
    """Return the names of the classes. Raises UserError where shards differ or have no labels."""
    if train.class_names != real.class_names:
        raise UserError(
            f"{real.path} has other classes than {train.path}; write it with"
            f" --classes-from {train.path}"
        )
    for shards in (train, real):
        if not len(shards) or min(shards.labels) < 0:
            raise UserError(f"{shards.path} holds images without a label")
    return train.class_names


def _to_name(
    args: argparse.Namespace,
    real: ShardImages,
    samples: NpzImages,
    num_classes: int,
    device: torch.device,
) -> dict[str, tuple[Tensor, Tensor]]:
    """Return images and their classes by what they are."""
    import torch

    images, labels = _labelled(real, device)
    parts = {"real images": (images, labels)}
    if args.tokenizer is not None:
        parts["reconstructions"] = (_reconstruct(args.tokenizer, images), labels)
    turns = torch.arange(len(samples), device=device) % num_classes
    parts["samples"] = (_read(samples, device), turns)
    return parts


def _labelled(shards: ShardImages, device: torch.device) -> tuple[Tensor, Tensor]:
    import torch

    return _read(shards, device), torch.from_numpy(shards.labels).long().to(device)


def _read(images: Images, device: torch.device) -> Tensor:
    import numpy as np
    import torch

    return torch.from_numpy(images.read(np.arange(len(images)))).to(device)


def _reconstruct(run_folder: Path, images: Tensor) -> Tensor:
    import torch

    from megavis.tokenizers.base import LatentTokenizer, open_tokenizer

    tokenizer = open_tokenizer(run_folder, device=images.device)
    parts = []
    for batch in images.split(_BATCH_SIZE):
        tokens = tokenizer.encode(batch)
        parts.append(
            tokenizer.decode(tokens[:, 0] if isinstance(tokenizer, LatentTokenizer) else tokens)
        )
    return torch.cat(parts)
