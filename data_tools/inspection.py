"""`verify` reads every byte of a shard folder; `inspect` draws a contact sheet of it."""

from __future__ import annotations

import argparse
import math
import tarfile
from pathlib import Path

import numpy as np
from PIL import Image

from data_tools.job_report import ProgressBar, say
from megavis.config.arguments import output_file, positive
from megavis.config.errors import UserError
from megavis.data.codecs.instances import painted_objects
from megavis.data.codecs.label_maps import painted
from megavis.data.codecs.transforms import Transform
from megavis.data.format.files import sha256_of_file
from megavis.data.format.folders import find_files
from megavis.data.format.manifest import PALETTE_NAME, SUFFIXES, Manifest, ShardEntry
from megavis.data.format.shards import ShardReader, index_path
from megavis.data.loading.dataset import ShardDataset
from megavis.tokenizers.palette import Palette

_BATCH = 256
_GAP = 2
_LOOK = 64  # side at which images of different sizes are shown


def add_verify_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `verify` to its parser."""
    parser.add_argument("directory", type=Path, help="a shard folder")


def run_verify(arguments: argparse.Namespace) -> int:
    """Report errors and return 1, or return 0. Raises UserError without a manifest."""
    code = say_problems(arguments.directory)
    if not code:
        say(f"{arguments.directory}: {Manifest.read(arguments.directory).size}, all good")
    return code


def say_problems(directory: Path) -> int:
    """Print each error in a shard folder; return 1 if there is one, else 0."""
    problems = find_problems(directory)
    for problem in problems:
        say(f"wrong: {problem}")
    return 1 if problems else 0


def find_problems(directory: Path) -> list[str]:
    """Return a message for each error in a shard folder. Raises UserError without a manifest."""
    manifest = Manifest.read(directory)
    problems = [f"{name} is not in the manifest" for name in _strays(directory, manifest)]
    with ProgressBar("verifying", total=manifest.num_samples, unit="samples") as progress:
        for shard in manifest.shards:
            try:
                problems += shard_problems(directory, shard, manifest)
            except (UserError, OSError, tarfile.TarError) as error:
                problems.append(f"{shard.name}: {error}")
            progress.advance(shard.num_samples)
    return problems or sample_problems(directory)


def _strays(directory: Path, manifest: Manifest) -> list[str]:
    """Return tars that are not in the manifest, which other readers would read too."""
    known = {shard.name for shard in manifest.shards}
    return [path.name for path in find_files(directory, "*.tar") if path.name not in known]


def shard_problems(directory: Path, shard: ShardEntry, manifest: Manifest) -> list[str]:
    """Compare one tar and its index with the manifest and with each other."""
    num_classes = len(manifest.class_names)
    path = directory / shard.name
    num_bytes = path.stat().st_size
    if num_bytes != shard.num_bytes:
        return [f"{shard.name} has {num_bytes} bytes, the manifest says {shard.num_bytes}"]
    if sha256_of_file(path) != shard.sha256:
        return [f"{shard.name} does not have the SHA-256 of the manifest"]
    if sha256_of_file(index_path(path)) != shard.index_sha256:
        return [f"{index_path(path).name} does not have the SHA-256 of the manifest"]
    index = ShardReader(path).index
    with tarfile.open(path) as tar:
        members = [(member.name, member.offset_data, member.size) for member in tar]
    names = [f"{key}.{SUFFIXES[manifest.kind]}" for key in index.keys]
    if members != list(zip(names, index.offsets, index.lengths, strict=True)):
        return [f"{index_path(path).name} does not list the members of {shard.name}"]
    if len(set(index.keys)) < len(index.keys):
        return [f"{shard.name} has two samples with the same key"]
    return [
        f"{shard.name}:{key} has the label {label}, but there are {num_classes} classes"
        for key, label in zip(index.keys, index.labels, strict=True)
        if not -1 <= label < num_classes
    ]


def sample_problems(directory: Path) -> list[str]:
    """Decode every sample of a folder with intact shards; return messages."""
    try:
        dataset = ShardDataset(directory, whole_images(directory))
        palette = None
        if dataset.manifest.kind == "palette":
            palette = Palette.load(directory / PALETTE_NAME)
        for start in range(0, len(dataset), _BATCH):
            samples, _ = dataset.read(np.arange(start, min(start + _BATCH, len(dataset))))
            if palette is not None:
                palette.decode(samples)
    except (UserError, ValueError) as error:
        return [str(error)]
    return dataset.skipped_names


def add_inspect_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `inspect` to its parser."""
    parser.add_argument("directory", type=Path, help="a shard folder")
    parser.add_argument("--out", type=output_file, required=True, help="the PNG file to write")
    parser.add_argument("--count", type=positive, default=100, help="images on the sheet")
    parser.add_argument(
        "--tokenizer", type=Path, metavar="RUN", help="run folder that made latents or ids"
    )
    parser.add_argument("--scale", type=positive, default=2, help="screen pixels per pixel")


def run_inspect(arguments: argparse.Namespace) -> int:
    """Write the contact sheet. Raises UserError."""
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
    if dataset.manifest.target is not None and dataset.manifest.target.kind == "instances":
        maps = np.stack([painted_objects(*each) for each in samples[["classes", "masks"]]])
        return np.concatenate([samples["image"], maps], axis=2)
    if dataset.manifest.kind == "pairs":  # the target to the right of its image
        targets, shown = samples[:, 1], dataset.manifest.target
        if shown is not None:
            assert shown.kind != "instances"
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
