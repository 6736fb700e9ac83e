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
from megavis.model.heads import VocabularyHead, split_cross_entropy, whole_logits
from megavis.model.init import normal
from megavis.model.patches import PatchEmbedding, TokenHead
from megavis.tokenizers.patches import normalize_patches, patchify, standardize

if TYPE_CHECKING:
    from megavis.tokenizers.base import IdTokenizer


class Tokens(Protocol):
    """One kind of token."""

    num_outputs: int
    """Numbers that a head gives for each."""

    def of(self, images: Any) -> Tensor:
        """Return the tokens `[b, T, ...]` of images, in raster order."""

    def embedding(self, core: Core) -> nn.Module:
        """Return a map of tokens `[b, c, ...]` to `[b, c, h]`."""

    def head(self, core: Core) -> nn.Module:
        """Return the last layer."""

    def errors(self, predictions: Tensor, targets: Tensor, core: Core) -> Tensor:
        """Return the loss of each predicted token, float32 `[b, q]`."""

    def outputs(self, predictions: Tensor, core: Core) -> Tensor:
        """Return predictions whole and batch first, `[b, q, d]` or logits `[b, q, v]`."""


class Patches:
    """Patches of standardised pixels; a prediction is scored by its squared error a number."""

    def __init__(self, *, image_size: int, patch_size: int, normalize: bool) -> None:
        self.image_size, self.patch_size, self.normalize = image_size, patch_size, normalize
        self.num_outputs = 3 * patch_size**2

    def of(self, images: Any) -> Tensor:
        """Return patches float32 `[b, T, d]` of images uint8 `[b, h, w, 3]`.

        Raises:
            UserError: they have another size or type.
        """
        return patches_of(images, image_size=self.image_size, patch_size=self.patch_size)

    def embedding(self, core: Core) -> nn.Module:
        """Return a linear map."""
        return PatchEmbedding(self.num_outputs, core.megatron.hidden_size)

    def head(self, core: Core) -> nn.Module:
        """Return the last norm and a linear map to pixels."""
        return TokenHead(core, self.num_outputs)

    def errors(self, predictions: Tensor, targets: Tensor, core: Core) -> Tensor:
        """Return the squared error a number: `[b, q]` (GVP, equation 6, with a unit Gaussian).

        Args:
            predictions: `[b, q, d]`.
            targets: patches likewise.
            core: of no meaning here.
        """
        if self.normalize:
            targets = normalize_patches(targets)
        return (predictions.float() - targets).square().mean(-1)

    def outputs(self, predictions: Tensor, core: Core) -> Tensor:
        """Return patches `[b, q, d]`, standardised as `of` gives them."""
        return predictions


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
        self.num_outputs, self.run_folder = vocabulary_size, tokenizer

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
        if smallest < 0 or largest >= self.num_outputs:
            raise UserError(
                f"the ids reach from {smallest} to {largest}; objective.vocabulary_size"
                f" {self.num_outputs} allows 0 to {self.num_outputs - 1}"
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
        if opened.vocabulary_size != self.num_outputs:
            raise UserError(
                f"{where} has {opened.vocabulary_size} ids; objective.vocabulary_size is"
                f" {self.num_outputs}"
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
        if manifest.vocabulary_size != self.num_outputs:
            yield (
                f"holds ids below {manifest.vocabulary_size}; objective.vocabulary_size is"
                f" {self.num_outputs}"
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
        return token_embedding(core, self.num_outputs, normal(0.02))

    def head(self, core: Core) -> nn.Module:
        """Return the last norm and a projection to logits, split over the tensor group."""
        return VocabularyHead(core, self.num_outputs, normal(0.02))

    def errors(self, predictions: Tensor, targets: Tensor, core: Core) -> Tensor:
        """Return nats `[b, q]` (GVP, equation 6, with a categorical distribution a token).

        Args:
            predictions: this process's logits `[q, b, v / tensor size]`.
            targets: ids `[b, q]`.
            core: tells the tensor group.
        """
        return split_cross_entropy(predictions, targets.t().contiguous(), core).t()

    def outputs(self, predictions: Tensor, core: Core) -> Tensor:
        """Return logits `[b, q, v]`."""
        return whole_logits(predictions, core)


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
