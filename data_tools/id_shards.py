"""`ids`: encode images as ids of a discrete tokenizer's codebook."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from data_tools.encoding import Encoding, add_encoding_arguments, encoding_from, mirrored
from data_tools.jobs import run_job
from data_tools.shard_tasks import Encoded
from data_tools.source_formats import open_source
from data_tools.sources import SourceImage
from megavis.config.errors import UserError
from megavis.data.codecs.codec import IdsCodec


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `ids` to its parser."""
    add_encoding_arguments(parser)
    parser.add_argument(
        "--flip", action="store_true", help="store flipped images too, as separate samples"
    )


def run(arguments: argparse.Namespace) -> int:
    """Write the shard folder. Raises UserError and OSError."""
    from megavis.tokenizers.network_tokenizer import IdTokenizer

    encoding, tokenizer = encoding_from(arguments)
    if not isinstance(tokenizer, IdTokenizer):
        raise UserError(f"{arguments.tokenizer} gives latents, not ids: use the verb latents")
    num_tokens = tokenizer.num_tokens(arguments.size)
    encoder = IdEncoder(encoding, num_tokens, tokenizer.vocabulary_size, flip=arguments.flip)
    return run_job(open_source(arguments), encoder, arguments, label="ids")


@dataclass(frozen=True)
class IdEncoder:
    """Decode and resize images, and encode them as ids of two bytes.

    Attributes:
        encoding: preparation and network.
        num_tokens: ids per image.
        vocabulary_size: size of the codebook.
        flip: store flipped images as additional samples.
    """

    encoding: Encoding
    num_tokens: int
    vocabulary_size: int
    flip: bool
    suffix: str = IdsCodec.suffix
    folders: tuple[str, ...] = ("",)

    @property
    def batch_size(self) -> int:
        """Images per batch."""
        return self.encoding.batch_size

    def settings(self, folder: str) -> dict[str, Any]:
        """Return everything that affects the bytes."""
        return {**self.encoding.settings(), "flip": self.flip}

    def prepare(self, directory: Path) -> None:
        """No further files are needed."""

    def encode(self, pictures: list[SourceImage]) -> list[Encoded]:
        """Return the payloads of each image: its crops, then the flipped ones."""
        images, refused = self.encoding.images(pictures)
        codec = IdsCodec(self.num_tokens, vocabulary_size=self.vocabulary_size)
        payloads = [[codec.encode(ids) for ids in view] for view in self._views(images)]
        count = self.encoding.crop.count
        encoded: list[Encoded] = []
        start = 0
        for refusal in refused:
            if refusal is not None:
                encoded.append(refusal)
                continue
            encoded.append([[code for view in payloads for code in view[start : start + count]]])
            start += count
        return encoded

    def describe(self, folder: str) -> dict[str, Any]:
        """Return the manifest's fields of a data set of ids."""
        return {
            **self.encoding.describe(),
            "kind": "ids",
            "num_tokens": self.num_tokens,
            "tokenizer": {
                "kind": self.encoding.kind,
                "sha256": self.encoding.sha256,
                "num_tokens": self.vocabulary_size,
            },
        }

    def _views(self, images: np.ndarray) -> list[np.ndarray]:
        """Return ids `[b, n]` of images `[b, s, s, 3]` and, with `flip`, of flipped ones."""
        import torch

        if not len(images):
            return []
        both = [images, mirrored(images)] if self.flip else [images]
        tokenizer = self.encoding.tokenizer()
        return [tokenizer.encode(torch.from_numpy(view)).cpu().numpy() for view in both]
