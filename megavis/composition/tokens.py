"""Tokens that a model reads or predicts, and how to decode them to images.

- `Colors`: palette ids, one per pixel.
- `Patches`: squares of standardised pixels. `Frames`: frames of a spectrogram.
- `Ids`: codebook ids, from shards or from a frozen tokenizer (`encoded_tokens.py`).
- `Latents`: real-valued, drawn from a frozen VAE's posterior (`encoded_tokens.py`).

Legend: b images, n tokens of an image, d values of a token, v vocabulary size, H and W pixels, h
hidden size.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from megavis.config.errors import UserError
from megavis.data.format.manifest import PALETTE_NAME, Manifest
from megavis.data.loading.loader import Batch
from megavis.model.core import Core
from megavis.model.embeddings import NormedLinear, ReplicatedLinear, token_embedding
from megavis.model.parameters import Fill, normal, xavier_uniform
from megavis.tokenizers.network_tokenizer import FrozenEncoder
from megavis.tokenizers.palette import Palette
from megavis.tokenizers.patches import (
    patchify,
    pixel_range,
    standardize,
    standardize_frames,
    to_uint8,
    unpatchify,
)

Key = Callable[[str], str]
"""Maps a word's key to the config's, for messages."""
OWN: Key = "objective.{}".format


class Tokens(ABC):
    """A kind of token.

    Attributes:
        width: values of a token, 1 for an id.
        key: maps the names of their keys to config keys, for messages.
        dimension: description of one dimension of a likelihood; None if it would mean nothing.
        sample_shape: shape of a sample in the shards.
        sample_type: dtype of a sample in the shards.
    """

    grid: tuple[int, int]
    width: int = 1
    key: Key
    dimension: str | None = None
    sample_shape: tuple[int, ...]
    sample_type: torch.dtype = torch.uint8

    @property
    def num_tokens(self) -> int:
        """Tokens n of an image."""
        return self.grid[0] * self.grid[1]

    @property
    def is_random(self) -> bool:
        """True if the tokens of an image are drawn."""
        return False

    @property
    def identity(self) -> str | None:
        """SHA-256 of the frozen tokenizer; None without one."""
        return None

    @property
    def frozen_encoder(self) -> FrozenEncoder | None:
        """The tokenizer that encodes images in training; None without one."""
        return None

    @abstractmethod
    def of(self, samples: Any, index: Tensor | None = None) -> Tensor:
        """Return the tokens of samples as in the shards, `[b, ...]`, in the tokenizer's form.

        Tokens are returned unchanged. `index`, int64 `[b]`, determines draws, if tokens are drawn.

        Raises:
            UserError: the samples have the wrong shape or type.
        """

    def sequence(self, tokens: Tensor) -> Tensor:
        """Return the tokens in raster order, `[b, n]` or `[b, n, d]`."""
        return tokens

    def from_sequence(self, tokens: Tensor) -> Tensor:
        """Invert `sequence`."""
        return tokens

    def check_values(self, tokens: Tensor) -> None:  # noqa: B027 - by default all can be
        """Raise UserError unless tokens can be embedded.

        Synchronizes with the device, so not for training steps.
        """

    @abstractmethod
    def check(self, manifest: Manifest, name: str) -> Iterator[str]:
        """Yield a message for each reason why shards do not suit paper `name`."""

    @abstractmethod
    def embedding(self, core: Core) -> nn.Module:
        """Build the embedding of tokens `[b, c, ...]` as `[b, c, h]`."""

    @abstractmethod
    def blank(self, images: Tensor) -> Tensor:
        """Return zeros as tokens in raster order for images `[b]`, on their device."""

    def prior(self, images: Tensor, *, seed: int) -> Tensor | None:
        """Draw tokens from the tokenizer's prior; None if it has none."""
        return None

    @abstractmethod
    def to_images(self, tokens: Tensor, folder: Path) -> Tensor:
        """Decode the output of `of` to images, uint8 `[b, H, W, 3]`.

        The run `folder` may contain a palette.

        Raises:
            UserError: there is no decoder.
        """

    def shown(self, images: Tensor) -> Tensor:
        """Return outputs of `to_images` as they are displayed, uint8 `[b, h, w, 3]`."""
        return images

    def check_images(self, folder: Path) -> None:
        """Raise UserError if these tokens cannot be decoded to images."""
        self.to_images(self.of(self.blank_batch(1, torch.device("cpu")).inputs), folder)

    def blank_batch(self, num_images: int, device: torch.device) -> Batch:
        """Return samples of zeros, all of class 0."""
        return blank_batch(num_images, self.sample_shape, self.sample_type, device)


class Vocabulary(Tokens):
    """Ids of a vocabulary."""

    vocabulary_size: int

    def check_values(self, tokens: Tensor) -> None:
        """Raise UserError unless all ids are whole numbers in the vocabulary."""
        if tokens.is_floating_point():
            raise UserError(f"the ids are of type {tokens.dtype}, not whole numbers")
        smallest, largest = int(tokens.min()), int(tokens.max())
        if smallest < 0 or largest >= self.vocabulary_size:
            raise UserError(
                f"the ids range from {smallest} to {largest}; {self.key('vocabulary_size')}"
                f" {self.vocabulary_size} allows 0 to {self.vocabulary_size - 1}"
            )

    def embedding(self, core: Core) -> nn.Module:
        """Build an embedding table, split over the tensor group."""
        return token_embedding(core, self.vocabulary_size, normal(0.02))

    def blank(self, images: Tensor) -> Tensor:
        """Return zeros int64 `[b, n]`."""
        return images.new_zeros(len(images), self.num_tokens)


class Vectors(Tokens):
    """Real-valued tokens.

    Attributes:
        channels: values of a cell, such as the colours of a pixel, which share one noise level.
    """

    value_range: tuple[float, float] | None = None
    """Smallest and largest value; None: unbounded."""

    @property
    def channels(self) -> int:
        """All values."""
        return self.width

    def embedding(self, core: Core, fill: Fill = xavier_uniform) -> nn.Module:
        """Build a linear map."""
        return ReplicatedLinear(self.width, core.megatron.hidden_size, fill)

    def blank(self, images: Tensor) -> Tensor:
        """Return zeros `[b, n, d]`."""
        return torch.zeros(len(images), self.num_tokens, self.width, device=images.device)


class Colors(Vocabulary):
    """Palette ids, one per pixel, as in palette shards, or with `windows` of larger images."""

    sample_type = torch.int64

    def __init__(
        self,
        *,
        image_size: int,
        vocabulary_size: int,
        windows: bool = False,
        key: Key = OWN,
    ) -> None:
        self.key, self.dimension = key, f"colour of a vocabulary of {vocabulary_size}"
        self.grid, self.vocabulary_size = (image_size, image_size), vocabulary_size
        self.sample_shape, self.windows = (image_size**2,), windows

    def of(self, samples: Any, index: Tensor | None = None) -> Tensor:
        """Return the samples as int64 `[b, n]`."""
        if samples.shape[1:] != self.sample_shape or samples.is_floating_point():
            raise UserError(
                f"the images have shape {list(samples.shape)} and type {samples.dtype}; this run"
                f" expects ids [b, {self.num_tokens}]"
            )
        return samples.long()

    def check(self, manifest: Manifest, name: str) -> Iterator[str]:
        """Check that shards hold palette ids of this size, with no more colours than logits."""
        size = self.grid[0]
        if manifest.kind != "palette":
            text = f"holds {manifest.kind} shards; {name} needs palette shards"
            yield text + (", or data.palette" if manifest.kind == "jpeg" else "")
        if manifest.image_size != size and not self.windows:
            yield f"holds images of {manifest.image_size}² pixels; data.image_size is {size}"
        if manifest.vocabulary_size > self.vocabulary_size:
            yield (
                f"has a palette of {manifest.vocabulary_size} colours;"
                f" {self.key('vocabulary_size')} is {self.vocabulary_size}"
            )

    def check_images(self, folder: Path) -> None:
        """Raise UserError if the run folder has no palette."""
        Palette.load(folder / PALETTE_NAME)

    def to_images(self, tokens: Tensor, folder: Path) -> Tensor:
        """Return the colours of ids; raise UserError if the run folder has no palette."""
        palette = Palette.load(folder / PALETTE_NAME)
        # A model may have more logits than there are colours; training makes the rest unlikely.
        known = tokens.clamp(max=len(palette) - 1)
        colours = palette.decode(known.cpu().numpy()).reshape(-1, *self.grid, 3)
        return torch.from_numpy(colours)


class Patches(Vectors):
    """Patches of standardised pixels.

    Args:
        embedding_norm: normalise their embedding.
    """

    channels = 3
    value_range = pixel_range()

    def __init__(self, *, image_size: int, patch_size: int, embedding_norm: bool = False) -> None:
        side, self.embedding_norm = image_size // patch_size, embedding_norm
        self.image_size, self.patch_size, self.grid = image_size, patch_size, (side, side)
        self.width, self.sample_shape = 3 * patch_size**2, (image_size, image_size, 3)

    def embedding(self, core: Core, fill: Fill = xavier_uniform) -> nn.Module:
        """Build a linear map, with a norm after it if configured."""
        if not self.embedding_norm:
            return super().embedding(core, fill)
        return NormedLinear(core, self.width, fill)

    def of(self, samples: Any, index: Tensor | None = None) -> Tensor:
        """Return patches float32 `[b, n, d]` of uint8 `[b, H, W, 3]`, or raise UserError."""
        check_images(samples, self.image_size)
        return patchify(standardize(samples), self.patch_size)

    def check(self, manifest: Manifest, name: str) -> Iterator[str]:
        """Check that the shards hold images."""
        if manifest.kind != "jpeg":
            yield f"holds {manifest.kind} shards; {name} needs jpeg shards"

    def check_images(self, folder: Path) -> None:
        """Accept any run: patches are pixels."""

    def to_images(self, tokens: Tensor, folder: Path | None = None) -> Tensor:
        """Return the nearest images uint8 `[b, H, W, 3]`."""
        return to_uint8(unpatchify(tokens, self.patch_size))


class Frames(Vectors):
    """`count` frames of a spectrogram of `width` values, each a token.

    With `normalize`, each value is standardised over the frames of a recording.
    """

    sample_type = torch.float32

    def __init__(self, count: int, width: int, *, normalize: bool) -> None:
        self.grid, self.width, self.sample_shape = (1, count), width, (count, width)
        self.normalize = normalize

    def of(self, samples: Any, index: Tensor | None = None) -> Tensor:
        """Return frames float32 `[b, n, d]`, or raise UserError."""
        if samples.shape[1:] != self.sample_shape:
            shape = ", ".join(map(str, self.sample_shape))
            raise UserError(
                f"the frames have shape {list(samples.shape)}; this run expects [b, {shape}]"
            )
        return standardize_frames(samples) if self.normalize else samples.float()

    def check(self, manifest: Manifest, name: str) -> Iterator[str]:
        """Check that shards hold frames of this count and width."""
        if manifest.kind != "recordings":
            yield f"holds {manifest.kind} shards; {name} needs recordings here"
        elif manifest.frame_shape != self.sample_shape:
            yield (
                f"holds frames {list(manifest.frame_shape or ())}; data.frames is"
                f" {self.sample_shape}"
            )

    def to_images(self, tokens: Tensor, folder: Path | None = None) -> Tensor:
        """Raise UserError: frames are not images."""
        raise UserError("frames of a spectrogram cannot be shown as images")


def blank_batch(
    num_images: int, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> Batch:
    """Return a batch with inputs `[num_images, *shape]` of zeros, all of class 0."""
    zeros = torch.zeros(num_images, dtype=torch.int64, device=device)
    return Batch(torch.zeros(num_images, *shape, dtype=dtype, device=device), zeros, zeros)


def check_images(images: Any, side: int) -> None:
    """Raise UserError unless images are uint8 `[b, side, side, 3]`."""
    if images.dtype != torch.uint8 or images.shape[1:] != (side, side, 3):
        raise UserError(
            f"the images have shape {list(images.shape)} and type {images.dtype}; a run of"
            f" {side}² pixels expects uint8 [b, {side}, {side}, 3]"
        )
