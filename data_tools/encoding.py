"""Encode batches of square crops with a trained tokenizer, for `latents` and `ids`."""

from __future__ import annotations

import argparse
import functools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from data_tools.decode import RefusedImageError, decode_image, decoder_versions
from data_tools.jobs import add_job_arguments
from data_tools.resize import RESIZE, Crop, add_crop_arguments, crop_from
from data_tools.source_formats import add_source_arguments
from data_tools.sources import SourceImage
from megavis.config.errors import UserError

if TYPE_CHECKING:  # torch is slow to import, and only needed for encoding
    from megavis.tokenizers.network_tokenizer import IdTokenizer, LatentTokenizer


def add_encoding_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of a verb that encodes images with a network."""
    add_source_arguments(parser)
    parser.add_argument(
        "--tokenizer", type=Path, required=True, metavar="RUN", help="run folder that trained it"
    )
    parser.add_argument("--size", type=int, required=True, help="side of its input images")
    add_crop_arguments(parser, ("center", "area"))
    parser.add_argument("--batch-size", type=int, default=16, help="images per batch")
    parser.add_argument("--device", default="cpu", help="cpu (one core per worker) or cuda")
    add_job_arguments(parser)


@dataclass(frozen=True)
class Encoding:
    """Preparation of images and the network that encodes them.

    Attributes:
        run_folder: of the tokenizer, which is opened once per process.
        kind: of the tokenizer.
        sha256: identity of the tokenizer.
        device: `cpu` or `cuda`.
        size: side of the images.
        crop: square crops to keep.
        batch_size: images per batch; affects the last bits of the results.
    """

    run_folder: Path
    kind: str
    sha256: str
    device: str
    size: int
    crop: Crop
    batch_size: int

    def settings(self) -> dict[str, Any]:
        """Return everything that affects the bytes."""
        return {
            "tokenizer": self.sha256,
            "size": self.size,
            "preparation": [RESIZE, str(self.crop), decoder_versions()],
            "arithmetic": [self.device, self.batch_size],
        }

    def describe(self) -> dict[str, Any]:
        """Return the manifest's fields that do not depend on the kind of output."""
        preparation = {"resize": RESIZE, "crop": str(self.crop), "decoders": decoder_versions()}
        return {"image_size": self.size, "preparation": preparation}

    def tokenizer(self) -> LatentTokenizer | IdTokenizer:
        """Return the network. Raises UserError if its run has been trained since the job began."""
        return _opened(self.run_folder, self.sha256, self.device)

    def images(self, pictures: Sequence[SourceImage]) -> tuple[np.ndarray, list[Refused]]:
        """Return the square crops of all images, and the reasons for rejected ones.

        Returns:
            uint8 `[p * count, size, size, 3]` of the p images that are not rejected, with the crops
            of an image adjacent; and for each given image the reason, or None.
        """
        squares: list[np.ndarray] = []
        refused: list[Refused] = []
        for picture in pictures:
            try:
                image = decode_image(picture.content)
                [crops] = self.crop.squares(image, sizes=(self.size,), name=picture.name)
            except RefusedImageError as refusal:
                refused.append(refusal)
                continue
            squares += crops
            refused.append(None)
        shape = (0, self.size, self.size, 3)
        return np.stack(squares) if squares else np.empty(shape, np.uint8), refused


Refused = RefusedImageError | None


def encoding_from(
    arguments: argparse.Namespace,
) -> tuple[Encoding, LatentTokenizer | IdTokenizer]:
    """Return encoding and opened network from the options of `add_encoding_arguments`.

    Raises:
        UserError: the options are invalid, or there is no tokenizer.
    """
    if min(arguments.size, arguments.batch_size) < 1:
        raise UserError("--size and --batch-size must be at least 1")
    from megavis.tokenizers.network_tokenizer import open_tokenizer

    device = _checked_device(arguments.device)
    tokenizer = open_tokenizer(arguments.tokenizer)
    encoding = Encoding(
        run_folder=arguments.tokenizer.resolve(),
        kind=tokenizer.kind,
        sha256=tokenizer.identity(),
        device=device,
        size=arguments.size,
        crop=crop_from(arguments),
        batch_size=arguments.batch_size,
    )
    return encoding, tokenizer


def mirrored(images: np.ndarray) -> np.ndarray:
    """Flip images `[b, h, w, 3]` horizontally."""
    return np.ascontiguousarray(images[:, :, ::-1])


def _checked_device(name: str) -> str:
    import torch

    if name not in ("cpu", "cuda"):
        raise UserError(f"--device must be cpu or cuda, not {name!r}")
    if name == "cuda" and not torch.cuda.is_available():
        raise UserError("--device cuda: torch finds no GPU here; use --device cpu")
    return name


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
