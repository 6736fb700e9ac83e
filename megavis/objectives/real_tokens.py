"""What an objective offers where real-valued tokens of latents are drawn from densities.

Legend: b images, n tokens, d numbers of a token, c channels and h, w of latents, H and W pixels.
"""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from megavis.model.mixture import Distribution


class RealTokens(Protocol):
    """What an objective offers besides, where real-valued tokens of latents are drawn.

    Beside these, one of `OneByOne` and `Uncovers`.
    """

    @property
    def num_tokens(self) -> int:
        """Tokens n of an image."""

    @property
    def token_size(self) -> int:
        """Numbers d of a token."""

    @property
    def latent_shape(self) -> tuple[int, int, int]:
        """Channels, height and width of the latents of an image."""

    @property
    def num_classes(self) -> int:
        """Classes of the labels; 0 where there are none."""

    @property
    def has_null_label(self) -> bool:
        """True where a label stands for no class."""

    @property
    def null_row(self) -> int:
        """Row of that label."""

    def decode(self, latents: Tensor) -> Tensor:
        """Return images uint8 `[b, H, W, 3]` of latents; raises UserError without a VAE."""

    def label_rows(self, labels: Tensor | None, count: int, device: torch.device) -> Tensor:
        """Return the rows int64 `[b]` of classes `[b]`; raises UserError out of range."""

    def parameters(self, predictions: Any) -> Tensor:
        """Return the parameters of the densities `[b, places, ...]`."""

    def density(self, parameters: Tensor) -> Distribution:
        """Return the densities that they are the parameters of."""

    def first_layer(self, layer: nn.Module) -> TokensToLatents:
        """Return the first layer, which turns tokens back into latents."""


class TokensToLatents(Protocol):
    """A first layer that can be undone."""

    def latents(self, tokens: Tensor) -> Tensor:
        """Return latents `[b, c, h, w]` of tokens `[b, n, d]`."""


@runtime_checkable
class OneByOne(RealTokens, Protocol):
    """Real-valued tokens drawn one after the other."""

    def inputs_at(self, tokens: Tensor, rows: Tensor, start: int, stop: int) -> tuple[Tensor, ...]:
        """Return the inputs of the places [start, stop), given the tokens before `stop - 1`."""


class EncodesImages(TokensToLatents, Protocol):
    """A first layer with an encoder."""

    def memory(self, images: Tensor) -> Tensor:
        """Encode images as `condition` gives them: `[b, c, h]`."""


@runtime_checkable
class ReadsImages(OneByOne, Protocol):
    """Tokens drawn given what an encoder makes of an image.

    The images, or their memory, are the last input of the first layer, after those of `inputs_at`.
    """

    def images_and_targets(self, inputs: Tensor) -> tuple[Tensor, Tensor]:
        """Return images and targets uint8 `[b, H, W, 3]` of what shards hold."""

    def condition(self, images: Tensor) -> Tensor:
        """Return what the encoder reads of images uint8 `[b, H, W, 3]`; raises UserError."""

    def first_layer(self, layer: nn.Module) -> EncodesImages:
        """Return the first layer."""


@runtime_checkable
class Uncovers(RealTokens, Protocol):
    """Real-valued tokens drawn all at once, of which the surest stay.

    Inputs of the first layer: tokens, rows of the labels, and the mask.
    """

    def draw_mask(self, sample_index: Tensor) -> Tensor:
        """Return which tokens training hides: bool `[b, n]`."""
