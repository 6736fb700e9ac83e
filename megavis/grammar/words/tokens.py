"""Tokens that a model reads or predicts.

Legend: n tokens of an image, d values of a token.
"""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from megavis.config.schema import Positive
from megavis.config.section import Above0, AtLeast0, DataConfig, Section


class TokenWord(Section):
    """A kind of token."""

    kind: str
    is_discrete: ClassVar[bool] = False
    """Whether tokens are ids of a vocabulary, not vectors."""

    @property
    def lacks_tokenizer(self) -> bool:
        """Whether images cannot be encoded, since no tokenizer is named."""
        return False

    def grid(self, data: DataConfig) -> tuple[int, int]:
        """Return rows and columns of the tokens of an image."""
        raise NotImplementedError


class SquareTokens(TokenWord):
    """Tokens that represent squares of an image."""

    patch_size: Positive = 16
    """Side in pixels of the square that a token represents."""

    def grid(self, data: DataConfig) -> tuple[int, int]:
        """Return √n and √n."""
        side = data.image_size // self.patch_size
        return side, side


class Colors(TokenWord):
    """Palette ids, one per pixel."""

    is_discrete: ClassVar[bool] = True
    kind: Literal["colors"] = "colors"
    vocabulary_size: Annotated[int, Field(gt=1)] = 512
    """Colours of the palette."""

    def grid(self, data: DataConfig) -> tuple[int, int]:
        """Return one cell per pixel."""
        return data.image_size, data.image_size


class Patches(SquareTokens):
    """Square patches of standardised pixels."""

    kind: Literal["patches"] = "patches"
    embedding_norm: bool = False
    """Normalise embedded patches before positions are added."""


class Ids(SquareTokens):
    """Ids of a trained codebook."""

    is_discrete: ClassVar[bool] = True

    kind: Literal["ids"] = "ids"
    vocabulary_size: Annotated[int, Field(gt=1)]
    """Entries of the codebook."""
    tokenizer: str | None = None
    """Run folder of the tokenizer, which encodes images and decodes samples; training on ids shards
    needs none."""

    @property
    def lacks_tokenizer(self) -> bool:
        """Whether none is named."""
        return self.tokenizer is None


class Latents(SquareTokens):
    """Latents of a VAE, drawn from its posterior."""

    kind: Literal["latents"] = "latents"
    channels: Positive = 16
    """Channels of a latent."""
    stacked: Positive = 1
    """Horizontally adjacent latents in one token."""
    scale: Above0 = 1.0
    """Factor applied to latents before they are read and predicted, so that their standard
    deviation is near 1. Likelihoods refer to the scaled latents."""
    tokenizer: str | None = None
    """Run folder of the VAE, which encodes images and decodes samples; training on latents shards
    needs none."""
    tokenizer_beta: AtLeast0 | None = None
    """β required of the VAE in `tokenizer`, checked against its run's config. None: any."""

    @property
    def lacks_tokenizer(self) -> bool:
        """Whether none is named."""
        return self.tokenizer is None

    @property
    def width(self) -> int:
        """Values d of a token."""
        return self.channels * self.stacked

    def grid(self, data: DataConfig) -> tuple[int, int]:
        """Return rows and columns of the tokens."""
        side = data.image_size // self.patch_size
        return side, side // self.stacked


class Frames(TokenWord):
    """Frames of a spectrogram, of the shape in `data.frames`."""

    kind: Literal["frames"] = "frames"

    def grid(self, data: DataConfig) -> tuple[int, int]:
        """Return 1 and the number of frames."""
        return 1, 0 if data.frames is None else data.frames[0]


AnyTokens = Frames | Colors | Patches | Ids | Latents
