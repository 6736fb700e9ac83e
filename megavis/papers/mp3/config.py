"""Config keys of MP3, and checks against other keys."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from megavis.composition.shared_keys import check_patches, check_placed, check_tokens
from megavis.config.schema import ConfigIssue, Fraction, ObjectiveConfig, RunConfig
from megavis.config.section import Above0


class MP3Config(ObjectiveConfig):
    """Config keys of MP3."""

    has_relative_positions: ClassVar[bool] = True
    takes_frames: ClassVar[bool] = True
    host_milliseconds: ClassVar[tuple[float, float] | None] = (2.6, 8.9)

    name: Literal["mp3"] = "mp3"
    mask_ratio: Fraction = 0.75
    """η: share of the patches without keys and values (section 3.2)."""
    given_ratio: Fraction = 0.0
    """Share of the patches, within the context, whose position is given, encoded as
    `model.positions` (section 4.3; 0.05 for speech)."""
    patch_size: Annotated[int, Field(gt=0)] = 16
    """Side of a patch in pixels (table 1); a frame of a spectrogram is one patch."""
    initial_deviation: Above0 = 0.02
    """Initial standard deviation of the blocks' matrices; DeiT's value (section 4.2) suits widths
    from 384, narrower networks need about 0.7 / √hidden_size."""
    class_token: bool = True
    """Prepend a learned token, to which all patches attend (section 3.1)."""

    def grid(self, config: RunConfig) -> tuple[int, int]:
        """Return rows and columns of positions: patches of an image, or one row of frames."""
        if config.data.frames is not None:
            return 1, config.data.frames[0]
        side = config.data.image_size // self.patch_size
        return side, side

    def check(self, config: RunConfig) -> Iterator[ConfigIssue]:
        """Check that patches tile the image, positions are not revealed, and tokens divide."""
        yield from check_patches(config, self.patch_size)
        yield from check_placed(
            config,
            mask_ratio=self.mask_ratio,
            given_ratio=self.given_ratio,
            ratio_key="objective.mask_ratio",
            given_key="objective.given_ratio",
        )
        rows, columns = self.grid(config)
        num_tokens = rows * columns + self.class_token
        culprit = "objective.class_token" if self.class_token else "it"
        yield from check_tokens(
            config, num_tokens, what=f"{num_tokens} tokens", remedy=f"set {culprit} to false"
        )
