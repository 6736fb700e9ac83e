"""Ids of a frozen tokenizer as tokens: shards of them, or images and the tokenizer.

Legend: b images, n tokens of an image, v ids.
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
    """Ids of a frozen tokenizer, given as shards or made on the way."""

    def __init__(
        self, *, image_size: int, side: int, vocabulary_size: int, tokenizer: str | None
    ) -> None:
        """Build.

        Args:
            image_size: side of the images in pixels.
            side: of the grid of ids.
            vocabulary_size: v.
            tokenizer: run folder of what makes ids of images; None where only ids come.
        """
        self.image_size, self.grid = image_size, (side, side)
        self.vocabulary_size, self.run_folder = vocabulary_size, tokenizer
        self.sample_shape = (image_size, image_size, 3)

    @property
    def identity(self) -> str | None:
        """SHA-256 of the tokenizer of images."""
        return None if self.run_folder is None else self.tokenizer.identity()

    def of(self, samples: Any, index: Tensor | None = None) -> Tensor:
        """Return ids int64 `[b, n]` of images uint8 `[b, h, w, 3]`; ids `[b, n]` stay.

        Raises:
            UserError: images without a tokenizer, or of another size.
        """
        if samples.ndim == 2:
            ids: Tensor = samples.long()
            return ids
        if samples.is_meta:
            # There are shapes alone: nothing to encode, and no tokenizer is asked for.
            return torch.zeros(
                len(samples), self.num_tokens, dtype=torch.int64, device=samples.device
            )
        if self.run_folder is None:
            raise UserError("ids are wanted; name what makes them of images in objective.tokenizer")
        check_images(samples, self.image_size)
        return self.tokenizer.to(samples.device).encode(samples)

    @cached_property
    def tokenizer(self) -> IdTokenizer:
        """The tokenizer, frozen.

        Raises:
            UserError: it gives no ids, or others than the config says.
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
                f"{where} makes {given} ids of an image of {self.image_size}² pixels;"
                f" objective.patch_size makes {self.num_tokens} tokens"
            )
        return opened

    def check(self, manifest: Manifest, name: str) -> Iterator[str]:
        """Check that the shards hold images and a tokenizer is named, or that they hold its ids."""
        if manifest.kind == "ids":
            yield from self._check_ids_shards(manifest)
        elif manifest.kind != "jpeg":
            yield f"holds {manifest.kind} shards; {name} needs jpeg or ids shards"
        elif self.run_folder is None:
            yield "holds images; name what makes ids of them in objective.tokenizer"

    def _check_ids_shards(self, manifest: Manifest) -> Iterator[str]:
        if manifest.num_tokens != self.num_tokens:
            yield f"holds {manifest.num_tokens} ids an image; the config has {self.num_tokens}"
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
        """Raise UserError where no tokenizer is named, or it does not fit."""
        self.to_images(torch.zeros(1, self.num_tokens, dtype=torch.int64), folder)

    def to_images(self, tokens: Tensor, folder: Path | None = None) -> Tensor:
        """Return the tokenizer's images of ids `[b, n]`; raises UserError where there is none."""
        if self.run_folder is None:
            raise UserError("pictures of ids need their tokenizer: name it in objective.tokenizer")
        return self.tokenizer.to(tokens.device).decode(tokens)


def open_ids_tokenizer(run_folder: str) -> IdTokenizer:
    """Open what `objective.tokenizer` names; raises UserError where it gives no ids."""
    from megavis.tokenizers.network_tokenizer import IdTokenizer, open_tokenizer

    try:
        opened = open_tokenizer(run_folder)
    except UserError as error:
        raise UserError(f"objective.tokenizer: {error}") from None
    if not isinstance(opened, IdTokenizer):
        raise UserError(f"objective.tokenizer: {run_folder} gives latents, not ids")
    return opened
