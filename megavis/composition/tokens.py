"""What a model reads or predicts of an image: patches of pixels, or ids of a discrete tokenizer.

"Bridging Autoregressive and Masked Modeling for Enhanced Visual Representation Learning", section
5: one kind is read and one predicted (p2p, p2d, d2d). "Denoising Autoregressive Representation
Learning", appendix B.4: patches in, ids out.

Legend: b images, T tokens of an image, q predicted ones, d numbers of a patch, v ids.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, nn

from megavis.config.errors import UserError
from megavis.data.manifest import Manifest
from megavis.model.core import Core
from megavis.model.embeddings import token_embedding
from megavis.model.init import normal
from megavis.model.patches import PatchEmbedding
from megavis.tokenizers.patches import patchify, standardize, to_uint8, unpatchify

if TYPE_CHECKING:
    from megavis.tokenizers.base import IdTokenizer


class Tokens(Protocol):
    """One kind of token."""

    def of(self, images: Any) -> Tensor:
        """Return the tokens `[b, T, ...]` of images, in raster order."""

    def embedding(self, core: Core) -> nn.Module:
        """Return a map of tokens `[b, c, ...]` to `[b, c, h]`."""

    def blank(self, images: Tensor) -> Tensor:
        """Return tokens `[b, T, ...]` of zeros for images `[b]`, on their device."""

    def to_images(self, tokens: Tensor) -> Tensor:
        """Undo `of`: uint8 `[b, h, w, 3]`; raises UserError where nothing does."""


class Patches:
    """Patches of standardised pixels."""

    def __init__(self, *, image_size: int, patch_size: int) -> None:
        self.image_size, self.patch_size = image_size, patch_size
        self.width = 3 * patch_size**2

    def of(self, images: Any) -> Tensor:
        """Return patches float32 `[b, T, d]` of images uint8 `[b, h, w, 3]`.

        Raises:
            UserError: they have another size or type.
        """
        return patches_of(images, image_size=self.image_size, patch_size=self.patch_size)

    def embedding(self, core: Core) -> nn.Module:
        """Return a linear map."""
        return PatchEmbedding(self.width, core.megatron.hidden_size)

    def blank(self, images: Tensor) -> Tensor:
        """Return patches `[b, T, d]` of zeros."""
        count = (self.image_size // self.patch_size) ** 2
        return torch.zeros(len(images), count, self.width, device=images.device)

    def to_images(self, tokens: Tensor) -> Tensor:
        """Return the nearest images uint8 `[b, h, w, 3]`."""
        return to_uint8(unpatchify(tokens, self.patch_size))


class Ids:
    """Ids of a frozen tokenizer, given as shards or made on the way; scored by cross-entropy."""

    def __init__(
        self, *, image_size: int, num_tokens: int, vocabulary_size: int, tokenizer: str | None
    ) -> None:
        """Build.

        Args:
            image_size: side of the images in pixels.
            num_tokens: T.
            vocabulary_size: v.
            tokenizer: run folder of what makes ids of images; None where only ids come.
        """
        self.image_size, self.num_tokens = image_size, num_tokens
        self.vocabulary_size, self.run_folder = vocabulary_size, tokenizer

    def of(self, images: Any) -> Tensor:
        """Return ids int64 `[b, T]` of images uint8 `[b, h, w, 3]`; ids `[b, T]` stay.

        Raises:
            UserError: images without a tokenizer, or of another size.
        """
        if images.ndim == 2:
            return images.long()
        if images.is_meta:
            # There are shapes alone: nothing to encode, and no tokenizer is asked for.
            return images.new_zeros(len(images), self.num_tokens, dtype=torch.int64)
        if self.run_folder is None:
            raise UserError("ids are wanted; name what makes them of images in objective.tokenizer")
        check_images(images, self.image_size)
        return self.tokenizer.to(images.device).encode(images)

    def check_ids(self, ids: Tensor) -> None:
        """Want ids of the codebook. Reads numbers off the device: not for a step of training.

        Raises:
            UserError: one is negative, or not below the vocabulary size.
        """
        smallest, largest = int(ids.min()), int(ids.max())
        if smallest < 0 or largest >= self.vocabulary_size:
            raise UserError(
                f"the ids reach from {smallest} to {largest}; objective.vocabulary_size"
                f" {self.vocabulary_size} allows 0 to {self.vocabulary_size - 1}"
            )

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

    def check(self, manifest: Manifest) -> Iterator[str]:
        """Yield what is wrong with ids shards, a sentence each."""
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

    def embedding(self, core: Core) -> nn.Module:
        """Return a table, split over the tensor group."""
        return token_embedding(core, self.vocabulary_size, normal(0.02))

    def blank(self, images: Tensor) -> Tensor:
        """Return ids int64 `[b, T]`, all 0."""
        return images.new_zeros(len(images), self.num_tokens)

    def to_images(self, tokens: Tensor) -> Tensor:
        """Return the tokenizer's images of ids `[b, T]`; raises UserError where there is none."""
        if self.run_folder is None:
            raise UserError("pictures of ids want what made them: name it in objective.tokenizer")
        return self.tokenizer.to(tokens.device).decode(tokens)


def patches_of(images: Any, *, image_size: int, patch_size: int) -> Tensor:
    """Return standardised patches float32 `[b, T, d]` in raster order of uint8 `[b, h, w, 3]`.

    Raises:
        UserError: the images have another size or type.
    """
    check_images(images, image_size)
    return patchify(standardize(images), patch_size)


def open_ids_tokenizer(run_folder: str) -> IdTokenizer:
    """Open what `objective.tokenizer` names; raises UserError where it gives no ids."""
    from megavis.tokenizers.base import IdTokenizer, open_tokenizer

    try:
        opened = open_tokenizer(run_folder)
    except UserError as error:
        raise UserError(f"objective.tokenizer: {error}") from None
    if not isinstance(opened, IdTokenizer):
        raise UserError(f"objective.tokenizer: {run_folder} gives latents, not ids")
    return opened


def check_images(images: Any, side: int) -> None:
    """Want uint8 `[b, side, side, 3]`; raises UserError for anything else."""
    if images.dtype != torch.uint8 or images.shape[1:] != (side, side, 3):
        raise UserError(
            f"the images have shape {list(images.shape)} and type {images.dtype}; a run of"
            f" {side}² pixels takes uint8 [b, {side}, {side}, 3]"
        )
