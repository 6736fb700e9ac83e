"""`latents`: encode images as mean and scale of a VAE's latents, which training samples from.

Both are float16, of the picture and of its mirror image, so that training also flips at random.
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
        "--no-flip", action="store_true", help="leave out the mirror images: half the size"
    )


def run(arguments: argparse.Namespace) -> int:
    """Write the shard folder and say what is in it. Raises UserError and OSError."""
    from megavis.tokenizers.network_tokenizer import LatentTokenizer

    encoding, tokenizer = encoding_from(arguments)
    if not isinstance(tokenizer, LatentTokenizer):
        raise UserError(f"{arguments.tokenizer} gives ids, not latents: use the verb ids")
    shape = tokenizer.latent_shape(arguments.size)
    encoder = LatentEncoder(encoding, shape, flipped=not arguments.no_flip)
    return run_job(open_source(arguments), encoder, arguments, label="latents")


@dataclass(frozen=True)
class LatentEncoder:
    """Decode, resize, encode, float16.

    Attributes:
        encoding: up to the network.
        shape: channels, height and width of the latents.
        flipped: store the mirror image's too.
    """

    encoding: Encoding
    shape: tuple[int, int, int]
    flipped: bool
    suffix: str = LatentsCodec.suffix
    folders: tuple[str, ...] = ("",)

    @property
    def batch_size(self) -> int:
        """Pictures encoded at once."""
        return self.encoding.batch_size

    def settings(self, folder: str) -> dict[str, Any]:
        """Return what decides about the bytes."""
        return {**self.encoding.settings(), "flipped": self.flipped}

    def prepare(self, directory: Path) -> None:
        """A folder holds nothing besides shards."""

    def encode(self, pictures: list[SourceImage]) -> list[Encoded]:
        """Return the payloads of each picture, one a crop."""
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
        """Iterate over float32 `[f, 2, c, h, w]` of images `[b, s, s, 3]`; f is 2 when flipped."""
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
        except ValueError:  # the codec refuses what training could not use
            return RefusedImageError(_NOT_FINITE)
