"""`latents` and `ids`: encode square crops of images with a trained tokenizer.

Latents are mean and scale of a VAE, from which training samples, in float16, for the image and the
flipped image, so that training can flip at random.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from data_tools.decode import RefusedImageError, decode_image
from data_tools.jobs import add_job_arguments, run_job
from data_tools.measuring import add_measure_argument, measuring_too
from data_tools.resize import (
    Crop,
    add_crop_arguments,
    crop_from,
    preparation,
    resize_name,
    side,
    versions,
)
from data_tools.shard_tasks import Encoded, ShardEncoder
from data_tools.source_formats import add_source_arguments, open_source
from data_tools.sources import SourceImage
from megavis.config.arguments import positive
from megavis.config.errors import UserError
from megavis.data.codecs.codec import IdsCodec, LatentsCodec
from megavis.data.format.manifest import SUFFIXES

if TYPE_CHECKING:  # torch is slow to import, and only needed for encoding
    from torch import Tensor

    from megavis.tokenizers.network_tokenizer import IdTokenizer, LatentTokenizer


_NOT_FINITE = "latents not finite in float16"


def add_encoding_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of a verb that encodes images with a network."""
    add_source_arguments(parser)
    parser.add_argument(
        "--tokenizer", type=Path, required=True, metavar="RUN", help="run folder that trained it"
    )
    parser.add_argument(
        "--size", type=side, metavar="N", required=True, help="side of its input images"
    )
    add_crop_arguments(parser, ("center", "inception"))
    parser.add_argument("--batch-size", type=positive, default=16, help="images per batch")
    parser.add_argument(
        "--device", choices=("cpu", "cuda"), default="cpu", help="cpu: one core per worker"
    )
    add_measure_argument(parser)
    add_job_arguments(parser, stores=True)


@dataclass(frozen=True)
class NetworkEncoder(ShardEncoder):
    """Decode images, cut squares, and encode them with a network.

    Attributes:
        run_folder: run folder of the tokenizer, which is opened once per process.
        kind: kind of the tokenizer.
        sha256: identity of the tokenizer.
        device: `cpu` or `cuda`.
        size: side of the squares.
        crop: square crops to keep.
        images_per_batch: affects the last bits of the results.
        flip: encode the mirror images too.
    """

    run_folder: Path
    kind: str
    sha256: str
    device: str
    size: int
    crop: Crop
    images_per_batch: int
    flip: bool

    @property
    def batch_size(self) -> int:
        """Images per batch."""
        return self.images_per_batch

    def settings(self, folder: str) -> dict[str, Any]:
        """Return everything that affects the bytes."""
        library = self.crop.library
        return {
            "tokenizer": self.sha256,
            "size": self.size,
            "preparation": [resize_name(library), str(self.crop), versions(library)],
            "arithmetic": [self.device, self.images_per_batch],
        }

    def describe(self, folder: str) -> dict[str, Any]:
        """Return the manifest's fields that do not depend on the kind of output."""
        library = self.crop.library
        prepared = preparation(resize_name(library), str(self.crop), library=library)
        return {"image_size": self.size, "preparation": prepared}

    def encode(self, pictures: list[SourceImage]) -> list[Encoded]:
        """Return the payloads of each image."""
        squares: list[np.ndarray] = []
        refused: list[RefusedImageError | None] = []
        for picture in pictures:
            try:
                image = decode_image(picture.content)
                [crops] = self.crop.squares(image, sizes=(self.size,), name=picture.name)
            except RefusedImageError as refusal:
                refused.append(refusal)
                continue
            squares += crops
            refused.append(None)
        codes, count = self._codes(squares), self.crop.count
        return [each or self.payloads([next(codes) for _ in range(count)]) for each in refused]

    def _codes(self, squares: list[np.ndarray]) -> Iterator[tuple[Tensor, ...]]:
        """Encode crops uint8 `[size, size, 3]`, each with its mirror image if `flip`."""
        import torch

        if not squares:
            return iter(())
        images = np.stack(squares)
        both = [images, np.ascontiguousarray(images[:, :, ::-1])] if self.flip else [images]
        tokenizer = _opened(self.run_folder, self.sha256, self.device)
        views = [tokenizer.encode(torch.from_numpy(view)).cpu() for view in both]
        return zip(*views, strict=True)

    def payloads(self, crops: list[tuple[Tensor, ...]]) -> Encoded:
        """Return an image's payloads from the codes of its crops and their mirror images."""
        raise NotImplementedError


def open_encoding(
    arguments: argparse.Namespace,
) -> tuple[dict[str, Any], LatentTokenizer | IdTokenizer]:
    """Return an encoder's fields except `flip`, and the network, from the options."""
    import torch

    from megavis.tokenizers.network_tokenizer import open_tokenizer

    if arguments.device == "cuda" and not torch.cuda.is_available():
        raise UserError("--device cuda: torch finds no GPU here; use --device cpu")
    tokenizer = open_tokenizer(arguments.tokenizer)
    fields = {
        "run_folder": arguments.tokenizer.resolve(),
        "kind": tokenizer.kind,
        "sha256": tokenizer.identity(),
        "device": arguments.device,
        "size": arguments.size,
        "crop": crop_from(arguments),
        "images_per_batch": arguments.batch_size,
    }
    return fields, tokenizer


@functools.lru_cache(maxsize=1)
def _opened(run_folder: Path, sha256: str, device: str) -> LatentTokenizer | IdTokenizer:
    import torch

    from megavis.tokenizers.network_tokenizer import open_tokenizer

    # The summation order of a convolution must not depend on the number of cores, so that a rerun
    # elsewhere gives the same bytes. On GPUs, tokenizers ensure this (`full_float32`).
    if device == "cpu":
        torch.set_num_threads(1)
    tokenizer = open_tokenizer(run_folder, device=device)
    if tokenizer.identity() != sha256:
        raise UserError(
            f"{run_folder} has a newer checkpoint than when this job began: run the same command "
            "again with another --out, or stop the training"
        )
    return tokenizer


def add_latents_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `latents` to its parser."""
    add_encoding_arguments(parser)
    parser.add_argument(
        "--no-flip", action="store_true", help="omit the flipped images, for half the size"
    )


def run_latents(arguments: argparse.Namespace) -> int:
    """Write the shard folder. Raises UserError and OSError."""
    from megavis.tokenizers.network_tokenizer import LatentTokenizer

    fields, tokenizer = open_encoding(arguments)
    if not isinstance(tokenizer, LatentTokenizer):
        raise UserError(f"{arguments.tokenizer} gives ids, not latents: use the verb ids")
    shape = tokenizer.latent_shape(arguments.size)
    encoder = LatentEncoder(**fields, flip=not arguments.no_flip, shape=shape)
    return run_job(
        open_source(arguments), measuring_too(encoder, arguments), arguments, label="latents"
    )


@dataclass(frozen=True)
class LatentEncoder(NetworkEncoder):
    """Encode images as float16 latents of `shape`, `[c, h, w]`, one sample per crop."""

    shape: tuple[int, int, int]
    suffix: str = SUFFIXES["latents"]

    def settings(self, folder: str) -> dict[str, Any]:
        """Return everything that affects the bytes."""
        return {**super().settings(folder), "flipped": self.flip}

    def describe(self, folder: str) -> dict[str, Any]:
        """Return the manifest's fields of a data set of latents."""
        return {
            **super().describe(folder),
            "kind": "latents",
            "latent_shape": self.shape,
            "flipped": self.flip,
            "tokenizer": {"kind": self.kind, "sha256": self.sha256},
        }

    def payloads(self, crops: list[tuple[Tensor, ...]]) -> Encoded:
        """Return one payload per crop."""
        codec = LatentsCodec(self.shape, flipped=self.flip)
        try:
            return [[codec.encode(np.stack([each.float() for each in crop])) for crop in crops]]
        except ValueError:  # the codec rejects what training could not use
            return RefusedImageError(_NOT_FINITE)


def add_ids_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `ids` to its parser."""
    add_encoding_arguments(parser)
    parser.add_argument(
        "--flip", action="store_true", help="store flipped images too, as separate samples"
    )


def run_ids(arguments: argparse.Namespace) -> int:
    """Write the shard folder. Raises UserError and OSError."""
    from megavis.tokenizers.network_tokenizer import IdTokenizer

    fields, tokenizer = open_encoding(arguments)
    if not isinstance(tokenizer, IdTokenizer):
        raise UserError(f"{arguments.tokenizer} gives latents, not ids: use the verb latents")
    num_tokens = tokenizer.num_tokens(arguments.size)
    encoder = IdEncoder(
        **fields,
        flip=arguments.flip,
        num_tokens=num_tokens,
        vocabulary_size=tokenizer.vocabulary_size,
    )
    return run_job(
        open_source(arguments), measuring_too(encoder, arguments), arguments, label="ids"
    )


@dataclass(frozen=True)
class IdEncoder(NetworkEncoder):
    """Encode images as ids of two bytes; an image's crops come before their mirror images."""

    num_tokens: int
    vocabulary_size: int
    suffix: str = SUFFIXES["ids"]

    def settings(self, folder: str) -> dict[str, Any]:
        """Return everything that affects the bytes."""
        return {**super().settings(folder), "flip": self.flip}

    def payloads(self, crops: list[tuple[Tensor, ...]]) -> Encoded:
        """Return the payloads of all crops, then of the mirror images."""
        codec = IdsCodec(self.num_tokens, vocabulary_size=self.vocabulary_size)
        views = zip(*crops, strict=True)
        return [[codec.encode(ids.numpy()) for view in views for ids in view]]

    def describe(self, folder: str) -> dict[str, Any]:
        """Return the manifest's fields of a data set of ids."""
        return {
            **super().describe(folder),
            "kind": "ids",
            "num_tokens": self.num_tokens,
            "tokenizer": {
                "kind": self.kind,
                "sha256": self.sha256,
                "num_tokens": self.vocabulary_size,
            },
        }
