"""What MP3 makes tokens of, and the layer that embeds them.

Legend: b images or recordings, n patches or frames, c of them context, g of them told where they
stand, d numbers of each, h hidden size.
"""

from __future__ import annotations

from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megavis.composition.tokens import patches_of
from megavis.config.choices import PositionKind
from megavis.config.errors import UserError
from megavis.model.core import Core
from megavis.model.embeddings import grid_positions, to_stream
from megavis.model.init import filled, normal
from megavis.model.patches import PatchEmbedding
from megavis.model.positions import grid_coordinates
from megavis.model.relative import OFF_GRID
from megavis.model.stream import State, Stream
from megavis.tokenizers.frames import standardize_frames
from megavis.tokenizers.patches import to_uint8, unpatchify


class Pieces(Protocol):
    """What samples are cut into.

    Attributes:
        shard_kind: the kind of shards that hold such samples.
        width: d.
    """

    shard_kind: str
    width: int

    def cut(self, samples: Tensor) -> Tensor:
        """Cut samples as shards hold them into pieces, float32 `[b, n, d]`."""

    def images(self, pieces: Tensor) -> Tensor:
        """Return images uint8 `[b, height, width, 3]`; raises UserError where there are none."""


class Patches:
    """Square patches of `side`² pixels of images uint8 `[b, image_size, image_size, 3]`."""

    shard_kind = "jpeg"

    def __init__(self, image_size: int, side: int) -> None:
        self.image_size, self.side, self.width = image_size, side, 3 * side**2

    def cut(self, samples: Tensor) -> Tensor:
        """Return standardized patches in raster order; raises UserError for other images."""
        return patches_of(samples, image_size=self.image_size, patch_size=self.side)

    def images(self, pieces: Tensor) -> Tensor:
        """Undo `cut`."""
        return to_uint8(unpatchify(pieces, self.side))


class Frames:
    """Frames of spectrograms float16 `[b, n, d]`, each a one-dimensional patch (section 3.1)."""

    shard_kind = "frames"

    def __init__(self, width: int) -> None:
        self.width = width

    def cut(self, samples: Tensor) -> Tensor:
        """Return standardized frames."""
        return standardize_frames(samples)

    def images(self, pieces: Tensor) -> Tensor:
        """Raise UserError: frames have no picture."""
        raise UserError("frames of a spectrogram are no images that could be drawn")


class SetEmbedding(nn.Module):
    """Embeds patches alike wherever they stand, behind a class token.

    Positions, where there are any, are added to those patches that are told where they stand, or
    travel on to attention (`relative_2d`); the class token has none.
    """

    places: Tensor

    def __init__(
        self,
        core: Core,
        width: int,
        *,
        grid: tuple[int, int],
        positions: PositionKind,
        class_token: bool,
    ) -> None:
        """Build.

        Args:
            core: sizes and groups.
            width: d.
            grid: rows and columns of places.
            positions: how those patches know where they stand that are told.
            class_token: put a learned token in front of the patches.
        """
        super().__init__()
        self.core = core
        self.patches = PatchEmbedding(width, core.megatron.hidden_size)
        self.positions = grid_positions(core, positions, grid, fill=normal(0.02))
        self.register_buffer("places", grid_coordinates(*grid), persistent=False)
        self.class_token: nn.Parameter | None = None
        if class_token:
            self.class_token = filled(core.megatron.hidden_size, fill=normal(0.02))

    def forward(self, inputs: tuple[Tensor, ...]) -> State:
        """Embed.

        Args:
            inputs: patches float32 `[b, n, d]`; places int64 `[b, c]`, among the tokens, of those
                that are seen; and places int64 `[b, g]`, among the patches, of those that are
                told where they stand.

        Returns:
            `[n, b, h]`, or `[n + 1, b, h]` with the class token, and the places as `context`.
        """
        patches, context, given = inputs
        hidden = self.patches(patches)
        told = torch.zeros(hidden.shape[:2], dtype=torch.bool, device=hidden.device)
        told = told.scatter(1, given, True)[..., None]
        hidden = torch.where(told, self.positions(hidden, self.places), hidden)
        places = self.places
        if self.class_token is not None:
            hidden = torch.cat([self.class_token.expand(len(hidden), 1, -1), hidden], dim=1)
            places = F.pad(places, (0, 0, 1, 0), value=OFF_GRID)
        carried = {"context": context, **self.positions.carried(places)}
        return Stream(to_stream(hidden, self.core), carried).pack()
