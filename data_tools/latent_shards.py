"""`latents`: encode images as mean and scale of a VAE's latents, from which training samples.

Both are float16, for the image and the flipped image, so that training can flip at random.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from data_tools.decode import RefusedImageError
from data_tools.encoding import Encoding, add_encoding_arguments, encoding_from, mirrored
from data_tools.jobs import run_job
from data_tools.shard_tasks import Encoded
from data_tools.source_formats import open_source
from data_tools.sources import SourceImage
from megavis.config.errors import UserError
from megavis.data.codecs.arrays import LatentsCodec

_NOT_FINITE = "latents not finite in float16"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `latents` to its parser."""
    add_encoding_arguments(parser)
    parser.add_argument(
        "--no-flip", action="store_true", help="omit the flipped images, for half the size"
    )


def run(arguments: argparse.Namespace) -> int:
    """Write the shard folder. Raises UserError and OSError."""
    from megavis.tokenizers.network_tokenizer import LatentTokenizer

    encoding, tokenizer = encoding_from(arguments)
    if not isinstance(tokenizer, LatentTokenizer):
        raise UserError(f"{arguments.tokenizer} gives ids, not latents: use the verb ids")
    shape = tokenizer.latent_shape(arguments.size)
    encoder = LatentEncoder(encoding, shape, flipped=not arguments.no_flip)
    return run_job(open_source(arguments), encoder, arguments, label="latents")


@dataclass(frozen=True)
class LatentEncoder:
    """Decode and resize images, and encode them as float16 latents.

    Attributes:
        encoding: preparation and network.
        shape: channels, height and width of the latents.
        flipped: store the flipped image's latents too.
    """

    encoding: Encoding
    shape: tuple[int, int, int]
    flipped: bool
    suffix: str = LatentsCodec.suffix
    folders: tuple[str, ...] = ("",)

    @property
    def batch_size(self) -> int:
        """Images per batch."""
        return self.encoding.batch_size

    def settings(self, folder: str) -> dict[str, Any]:
        """Return everything that affects the bytes."""
        return {**self.encoding.settings(), "flipped": self.flipped}

    def prepare(self, directory: Path) -> None:
        """No further files are needed."""

    def encode(self, pictures: list[SourceImage]) -> list[Encoded]:
        """Return the payloads of each image, one per crop."""
        images, refused = self.encoding.images(pictures)
        views = self._views(images)
        count = self.encoding.crop.count
        encoded: list[Encoded] = []
        for refusal in refused:
            encoded.append(refusal or self._payloads([next(views) for _ in range(count)]))
        return encoded

    def describe(self, folder: str) -> dict[str, Any]:
        """Return the manifest's fields of a data set of latents."""
        return {
            **self.encoding.describe(),
            "kind": "latents",
            "latent_shape": self.shape,
            "flipped": self.flipped,
            "tokenizer": {"kind": self.encoding.kind, "sha256": self.encoding.sha256},
        }

    def _views(self, images: np.ndarray) -> Any:
        """Encode images `[b, s, s, 3]`; yields float32 `[f, 2, c, h, w]`, f is 2 if flipped."""
        import torch

        if not len(images):
            return iter(())
        both = [images, mirrored(images)] if self.flipped else [images]
        tokenizer = self.encoding.tokenizer()
        latents = [tokenizer.encode(torch.from_numpy(view)).float().cpu() for view in both]
        return iter(torch.stack(latents, dim=1).numpy())

    def _payloads(self, views: list[np.ndarray]) -> Encoded:
        codec = LatentsCodec(self.shape, flipped=self.flipped)
        try:
            return [[codec.encode(view) for view in views]]
        except ValueError:  # the codec rejects what training could not use
            return RefusedImageError(_NOT_FINITE)
