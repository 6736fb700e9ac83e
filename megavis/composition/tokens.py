"""Tokens that a model reads or predicts, and the way back to an image.

- `Colors`: palette ids, a token a pixel.
- `Patches`: squares of standardised pixels; `Frames`: those of a spectrogram.
- `Ids`: of a codebook, as shards hold them or as a frozen tokenizer makes them (`codebook.py`).
- `Latents`: real-valued, drawn from a frozen VAE's posterior (`latents.py`).

Legend: b images, n tokens of an image, d numbers of a token, v ids.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from megavis.config.errors import UserError
from megavis.data.format.manifest import PALETTE_NAME, Manifest
from megavis.data.loading.batch import Batch
from megavis.model.core import Core
from megavis.model.embeddings import PatchEmbedding, token_embedding
from megavis.model.init import Fill, normal, xavier_uniform
from megavis.tokenizers.palette import Palette
from megavis.tokenizers.patches import (
    patchify,
    standardize,
    standardize_frames,
    to_uint8,
    unpatchify,
)


class Tokens(ABC):
    """One kind of token.

    Attributes:
        grid: rows and columns of the tokens of an image.
        sample_shape: of a sample as shards hold it.
        sample_type: likewise.
    """

    grid: tuple[int, int]
    sample_shape: tuple[int, ...]
    sample_type: torch.dtype = torch.uint8

    @property
    def num_tokens(self) -> int:
        """Tokens n of an image."""
        return self.grid[0] * self.grid[1]

    @property
    def is_random(self) -> bool:
        """True where the tokens of an image are drawn."""
        return False

    @property
    def identity(self) -> str | None:
        """SHA-256 of the frozen network that makes the tokens; None where none does."""
        return None

    @abstractmethod
    def of(self, samples: Any, index: Tensor | None = None) -> Tensor:
        """Return the tokens of samples `[b, ...]`, as what makes them gives them.

        Args:
            samples: as shards hold them, or tokens already.
            index: int64 `[b]`, of the samples, where tokens are drawn.

        Raises:
            UserError: samples of another form.
        """

    def sequence(self, tokens: Tensor) -> Tensor:
        """Return them in raster order, `[b, n]` or `[b, n, d]`."""
        return tokens

    def from_sequence(self, tokens: Tensor) -> Tensor:
        """Undo `sequence`."""
        return tokens

    @abstractmethod
    def check_values(self, tokens: Tensor) -> None:
        """Check that tokens can be embedded. Raises UserError otherwise.

        Reads numbers off the device: not for a step of training.
        """

    @abstractmethod
    def check(self, manifest: Manifest, name: str) -> Iterator[str]:
        """Yield what is wrong with shards for a paper of this name, a sentence each."""

    @abstractmethod
    def embedding(self, core: Core, fill: Fill | None = None) -> nn.Module:
        """Return a map of tokens `[b, c, ...]` to `[b, c, h]`."""

    @abstractmethod
    def blank(self, images: Tensor) -> Tensor:
        """Return tokens of zeros in raster order for images `[b]`, on their device."""

    def prior(self, images: Tensor, *, seed: int) -> Tensor | None:
        """Draw tokens as their tokenizer's training assumed them; None where it assumed nothing."""
        return None

    @abstractmethod
    def to_images(self, tokens: Tensor, folder: Path) -> Tensor:
        """Undo `of`: uint8 `[b, h, w, 3]`.

        Args:
            tokens: as `of` gives them.
            folder: of the run, which may hold what decodes them.

        Raises:
            UserError: nothing does.
        """

    def shown(self, images: Tensor) -> Tensor:
        """Return what `to_images` gives as pictures for people, uint8 `[b, h, w, 3]`."""
        return images

    def check_images(self, folder: Path) -> None:
        """Raise UserError where nothing makes images of these tokens."""
        self.to_images(self.of(self.blank_batch(1, torch.device("cpu")).inputs), folder)

    def blank_batch(self, num_images: int, device: torch.device) -> Batch:
        """Return samples of zeros, all of class 0."""
        return blank_batch(num_images, self.sample_shape, self.sample_type, device)


class Vocabulary(Tokens):
    """Ids of a vocabulary.

    Attributes:
        vocabulary_size: v.
    """

    vocabulary_size: int

    def check_values(self, tokens: Tensor) -> None:
        """Check that ids are of the vocabulary."""
        smallest, largest = int(tokens.min()), int(tokens.max())
        if smallest < 0 or largest >= self.vocabulary_size:
            raise UserError(
                f"the ids reach from {smallest} to {largest}; objective.vocabulary_size"
                f" {self.vocabulary_size} allows 0 to {self.vocabulary_size - 1}"
            )

    def embedding(self, core: Core, fill: Fill | None = None) -> nn.Module:
        """Return a table, split over the tensor group."""
        return token_embedding(core, self.vocabulary_size, fill or normal(0.02))

    def blank(self, images: Tensor) -> Tensor:
        """Return ids int64 `[b, n]`, all 0."""
        return images.new_zeros(len(images), self.num_tokens)


class Vectors(Tokens):
    """Tokens of several numbers.

    Attributes:
        width: d.
    """

    width: int

    def check_values(self, tokens: Tensor) -> None:
        """Accept any numbers."""

    def embedding(self, core: Core, fill: Fill | None = None) -> nn.Module:
        """Return a linear map."""
        return PatchEmbedding(self.width, core.megatron.hidden_size, fill or xavier_uniform)

    def blank(self, images: Tensor) -> Tensor:
        """Return tokens `[b, n, d]` of zeros."""
        return torch.zeros(len(images), self.num_tokens, self.width, device=images.device)


class Colors(Vocabulary):
    """Ids of a palette: a pixel each, as palette shards hold them."""

    sample_type = torch.int64

    def __init__(self, *, image_size: int, vocabulary_size: int, windows: bool = False) -> None:
        """Build.

        Args:
            image_size: side of the images in pixels.
            vocabulary_size: v, most colours that a palette may have.
            windows: samples are cut out of larger images.
        """
        self.grid, self.vocabulary_size = (image_size, image_size), vocabulary_size
        self.sample_shape, self.windows = (image_size**2,), windows

    def of(self, samples: Any, index: Tensor | None = None) -> Tensor:
        """Return ids int64 `[b, n]`."""
        if samples.shape[1:] != self.sample_shape or samples.is_floating_point():
            raise UserError(
                f"the images have shape {list(samples.shape)} and type {samples.dtype}; this run"
                f" takes ids [b, {self.num_tokens}]"
            )
        ids: Tensor = samples.long()
        return ids

    def check(self, manifest: Manifest, name: str) -> Iterator[str]:
        """Check for palette shards of this size, with no more colours than logits."""
        size = self.grid[0]
        if manifest.kind != "palette":
            text = f"holds {manifest.kind} shards; {name} needs palette shards"
            yield text + (", or data.palette" if manifest.kind == "jpeg" else "")
        if manifest.image_size != size and not self.windows:
            yield f"holds images of {manifest.image_size}² pixels; data.image_size is {size}"
        if manifest.vocabulary_size > self.vocabulary_size:
            yield (
                f"has a palette of {manifest.vocabulary_size} colours;"
                f" objective.vocabulary_size is {self.vocabulary_size}"
            )

    def check_images(self, folder: Path) -> None:
        """Raise UserError where the run folder has no palette."""
        Palette.load(folder / PALETTE_NAME)

    def to_images(self, tokens: Tensor, folder: Path) -> Tensor:
        """Return the colours of ids; raises UserError where the run folder has no palette."""
        palette = Palette.load(folder / PALETTE_NAME)
        # A model may have more outputs than the palette colours; it learns never to use them.
        known = tokens.clamp(max=palette.num_tokens - 1)
        colours = palette.decode(known.cpu().numpy()).reshape(-1, *self.grid, 3)
        return torch.from_numpy(colours)


class Patches(Vectors):
    """Patches of standardised pixels."""

    def __init__(self, *, image_size: int, patch_size: int) -> None:
        side = image_size // patch_size
        self.image_size, self.patch_size, self.grid = image_size, patch_size, (side, side)
        self.width, self.sample_shape = 3 * patch_size**2, (image_size, image_size, 3)

    def of(self, samples: Any, index: Tensor | None = None) -> Tensor:
        """Return patches float32 `[b, n, d]` of images uint8 `[b, h, w, 3]`.

        Raises:
            UserError: they have another size or type.
        """
        check_images(samples, self.image_size)
        return patchify(standardize(samples), self.patch_size)

    def check(self, manifest: Manifest, name: str) -> Iterator[str]:
        """Check that the shards hold images."""
        if manifest.kind != "jpeg":
            yield f"holds {manifest.kind} shards; {name} needs jpeg shards"

    def check_images(self, folder: Path) -> None:
        """Accept any run: patches are pixels."""

    def to_images(self, tokens: Tensor, folder: Path | None = None) -> Tensor:
        """Return the nearest images uint8 `[b, h, w, 3]`."""
        return to_uint8(unpatchify(tokens, self.patch_size))


class Frames(Vectors):
    """Frames of spectrograms, each a one-dimensional patch."""

    sample_type = torch.float32

    def __init__(self, count: int, width: int) -> None:
        """Build for so many frames of `width` numbers."""
        self.grid, self.width, self.sample_shape = (1, count), width, (count, width)

    def of(self, samples: Any, index: Tensor | None = None) -> Tensor:
        """Return standardised frames float32 `[b, n, d]`."""
        return standardize_frames(samples)

    def check(self, manifest: Manifest, name: str) -> Iterator[str]:
        """Check that the shards hold frames of this number and width."""
        if manifest.kind != "frames":
            yield f"holds {manifest.kind} shards; {name} needs frames shards here"
        elif manifest.frame_shape != self.sample_shape:
            yield (
                f"holds frames {list(manifest.frame_shape or ())}; data.frames is"
                f" {self.sample_shape}"
            )

    def to_images(self, tokens: Tensor, folder: Path | None = None) -> Tensor:
        """Raise UserError: frames have no picture."""
        raise UserError("frames of a spectrogram are no images that could be drawn")


def blank_batch(
    num_images: int, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> Batch:
    """Return a batch of zeros: inputs `[num_images, *shape]`, all of class 0."""
    zeros = torch.zeros(num_images, dtype=torch.int64, device=device)
    return Batch(torch.zeros(num_images, *shape, dtype=dtype, device=device), zeros, zeros)


def check_images(images: Any, side: int) -> None:
    """Check for uint8 `[b, side, side, 3]`. Raises UserError for anything else."""
    if images.dtype != torch.uint8 or images.shape[1:] != (side, side, 3):
        raise UserError(
            f"the images have shape {list(images.shape)} and type {images.dtype}; a run of"
            f" {side}² pixels takes uint8 [b, {side}, {side}, 3]"
        )
