"""`inspect`: a contact sheet of a shard folder, decoded from its tokens, latents or files."""

from __future__ import annotations

import argparse
import math
from pathlib import Path

import numpy as np
from PIL import Image

from data_tools.job_report import say
from megavis.config.arguments import output_file
from megavis.config.errors import UserError
from megavis.data.codecs.label_maps import painted
from megavis.data.codecs.transforms import Transform
from megavis.data.format.manifest import PALETTE_NAME, Manifest
from megavis.data.loading.dataset import ShardDataset
from megavis.tokenizers.palette import Palette

_GAP = 2
_LOOK = 64  # side at which images of different sizes are shown


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `inspect` to its parser."""
    parser.add_argument("directory", type=Path, help="a shard folder")
    parser.add_argument("--out", type=output_file, required=True, help="the PNG file to write")
    parser.add_argument("--count", type=int, default=100, help="images on the sheet")
    parser.add_argument(
        "--tokenizer", type=Path, metavar="RUN", help="run folder that made latents or ids"
    )
    parser.add_argument("--scale", type=int, default=2, help="screen pixels per pixel")


def run(arguments: argparse.Namespace) -> int:
    """Write the contact sheet. Raises UserError."""
    if min(arguments.count, arguments.scale) < 1:
        raise UserError("--count and --scale must be at least 1")
    dataset = ShardDataset(arguments.directory, whole_images(arguments.directory))
    count = min(arguments.count, len(dataset))
    indices = np.linspace(0, len(dataset) - 1, count).round().astype(np.int64)
    images = _pixels(dataset, indices, arguments.tokenizer)
    height, width = images.shape[1:3]
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(tile(images, scale=arguments.scale)).save(arguments.out, "PNG")
    say(
        f"{arguments.out}: {count} of {len(dataset)} samples, {width}x{height}, "
        f"{len(dataset.class_names)} classes"
    )
    return 0


def whole_images(directory: Path) -> Transform | None:
    """Return a transform for images of different sizes, if needed."""
    manifest = Manifest.read(directory)
    if manifest.target is not None:
        return Transform(image_size=_LOOK, crop="whole")
    if manifest.kind != "jpeg" or manifest.image_size is not None:
        return None
    return Transform(image_size=_LOOK, crop="center")


def _pixels(dataset: ShardDataset, indices: np.ndarray, run_folder: Path | None) -> np.ndarray:
    """Return the samples as pixels uint8 `[n, h, w, 3]`. Raises UserError if that fails."""
    samples, _ = dataset.read(indices)
    if dataset.manifest.kind == "jpeg":
        return samples
    if dataset.manifest.kind == "pairs":  # the target to the right of its image
        targets, shown = samples[:, 1], dataset.manifest.target
        if shown is not None:
            targets = painted(targets, shown.kind)
        return np.concatenate([samples[:, 0], targets], axis=2)
    if dataset.manifest.kind != "palette":
        return _decoded(dataset, samples, run_folder)
    size = dataset.manifest.image_size or 0
    palette = Palette.load(dataset.directory / PALETTE_NAME)
    return palette.decode(samples).reshape(len(indices), size, size, 3)


def _decoded(dataset: ShardDataset, samples: np.ndarray, run_folder: Path | None) -> np.ndarray:
    """Decode ids, or the means of latents, to images with the tokenizer."""
    import torch

    from megavis.tokenizers.network_tokenizer import open_tokenizer

    kind, identity = dataset.manifest.kind, dataset.manifest.identity
    if run_folder is None:
        raise UserError(
            f"{dataset.directory} holds {kind}: give their tokenizer's run folder in --tokenizer"
        )
    tokenizer = open_tokenizer(run_folder)
    if tokenizer.identity() != identity:
        raise UserError(
            f"{run_folder} is not the tokenizer that made {dataset.directory}, or another "
            f"checkpoint of it: SHA-256 {tokenizer.identity()[:12]}, not {str(identity)[:12]}"
        )
    codes = samples[:, 0] if kind == "latents" else samples.astype(np.int64)
    images = [tokenizer.decode(torch.from_numpy(code[None])).cpu().numpy() for code in codes]
    return np.concatenate(images)


def tile(images: np.ndarray, *, scale: int, columns: int | None = None) -> np.ndarray:
    """Arrange images uint8 `[n, h, w, 3]` in a grid on white: uint8 `[H, W, 3]`.

    Without `columns` the grid is nearly square.
    """
    count, height, width = images.shape[:3]
    columns = columns or math.ceil(math.sqrt(count * height / width))
    rows = math.ceil(count / columns)
    steps = np.array([height, width]) * scale + _GAP
    sheet = np.full((*(steps * (rows, columns) + _GAP), 3), 255, np.uint8)
    for number, image in enumerate(images):
        top, left = steps * divmod(number, columns) + _GAP
        large = image.repeat(scale, axis=0).repeat(scale, axis=1)
        sheet[top : top + height * scale, left : left + width * scale] = large
    return sheet
