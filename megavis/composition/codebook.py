"""Codebook ids as tokens, read from shards or encoded from images by a frozen tokenizer.

Legend: b images, n tokens of an image, v vocabulary size, H and W pixels.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from megavis.composition.tokens import Vocabulary, check_images
from megavis.config.errors import UserError
from megavis.data.format.manifest import Manifest

if TYPE_CHECKING:
    from megavis.tokenizers.network_tokenizer import IdTokenizer


class TokenIds(Vocabulary):
    """Ids of a frozen tokenizer, precomputed or encoded on the fly."""

    def __init__(
        self, *, image_size: int, side: int, vocabulary_size: int, tokenizer: str | None
    ) -> None:
        """Build.

        Args:
            image_size: side of the images in pixels.
            side: side of the grid of ids.
            vocabulary_size: v.
            tokenizer: run folder of the tokenizer; None if all inputs are ids.
        """
        self.image_size, self.grid = image_size, (side, side)
        self.vocabulary_size, self.run_folder = vocabulary_size, tokenizer
        self.sample_shape = (image_size, image_size, 3)

    @property
    def identity(self) -> str | None:
        """SHA-256 of the tokenizer; None without one."""
        return None if self.run_folder is None else self.tokenizer.identity()

    def of(self, samples: Any, index: Tensor | None = None) -> Tensor:
        """Encode images uint8 `[b, H, W, 3]` as ids int64 `[b, n]`; ids are returned unchanged.

        Raises:
            UserError: images have the wrong size, or there is no tokenizer.
        """
        if samples.ndim == 2:
            ids: Tensor = samples.long()
            return ids
        if samples.is_meta:
            # Only shapes matter on the meta device; do not open the tokenizer.
            return torch.zeros(
                len(samples), self.num_tokens, dtype=torch.int64, device=samples.device
            )
        if self.run_folder is None:
            raise UserError("images need a tokenizer: name its run folder in objective.tokenizer")
        check_images(samples, self.image_size)
        return self.tokenizer.to(samples.device).encode(samples)

    @cached_property
    def tokenizer(self) -> IdTokenizer:
        """The frozen tokenizer.

        Raises:
            UserError: it gives no ids, or does not fit the config.
        """
        assert self.run_folder is not None
        opened = open_ids_tokenizer(self.run_folder)
        where = f"objective.tokenizer: {self.run_folder}"
        if opened.vocabulary_size != self.vocabulary_size:
            raise UserError(
                f"{where} has {opened.vocabulary_size} ids; objective.vocabulary_size is"
                f" {self.vocabulary_size}"
            )
        given = opened.num_tokens(self.image_size)
        if given != self.num_tokens:
            raise UserError(
                f"{where} encodes an image of {self.image_size}² pixels as {given} ids;"
                f" objective.patch_size makes {self.num_tokens} tokens"
            )
        return opened

    def check(self, manifest: Manifest, name: str) -> Iterator[str]:
        """Check that shards hold images, and there is a tokenizer, or matching ids."""
        if manifest.kind == "ids":
            yield from self._check_ids_shards(manifest)
        elif manifest.kind != "jpeg":
            yield f"holds {manifest.kind} shards; {name} needs jpeg or ids shards"
        elif self.run_folder is None:
            yield "holds images; name the tokenizer's run folder in objective.tokenizer"

    def _check_ids_shards(self, manifest: Manifest) -> Iterator[str]:
        if manifest.num_tokens != self.num_tokens:
            yield f"holds {manifest.num_tokens} ids per image; the config has {self.num_tokens}"
        if manifest.vocabulary_size != self.vocabulary_size:
            yield (
                f"holds ids below {manifest.vocabulary_size}; objective.vocabulary_size is"
                f" {self.vocabulary_size}"
            )
        elif self.run_folder is not None:
            made_by = self.tokenizer.identity()
            if manifest.identity != made_by:
                yield (
                    f"was made by the tokenizer {str(manifest.identity)[:12]}; that of"
                    f" objective.tokenizer, {self.run_folder}, is {made_by[:12]}"
                )

    def check_images(self, folder: Path) -> None:
        """Raise UserError if there is no tokenizer, or it does not fit."""
        self.to_images(torch.zeros(1, self.num_tokens, dtype=torch.int64), folder)

    def to_images(self, tokens: Tensor, folder: Path | None = None) -> Tensor:
        """Decode ids `[b, n]` to images; raise UserError if there is no tokenizer."""
        if self.run_folder is None:
            raise UserError("decoding ids needs their tokenizer: name it in objective.tokenizer")
        return self.tokenizer.to(tokens.device).decode(tokens)


def open_ids_tokenizer(run_folder: str) -> IdTokenizer:
    """Open the tokenizer named by `objective.tokenizer`; raise UserError if it gives no ids."""
    from megavis.tokenizers.network_tokenizer import IdTokenizer, open_tokenizer

    try:
        opened = open_tokenizer(run_folder)
    except UserError as error:
        raise UserError(f"objective.tokenizer: {error}") from None
    if not isinstance(opened, IdTokenizer):
        raise UserError(f"objective.tokenizer: {run_folder} gives latents, not ids")
    return opened
