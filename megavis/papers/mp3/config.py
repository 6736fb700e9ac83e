"""Config keys of MP3, and what they mean."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from megavis.config.schema import Fraction, RunConfig
from megavis.config.section import Above0
from megavis.grammar.grammar import Grammar
from megavis.grammar.paper import PaperConfig, Renamed
from megavis.grammar.words import (
    Context,
    Frames,
    InContext,
    InitialWeights,
    LearnedTokens,
    Patches,
    Place,
)


class MP3Config(PaperConfig):
    """Config keys of MP3."""

    takes_frames: ClassVar[bool] = True
    generates: ClassVar[bool] = False
    names: ClassVar[Mapping[str, str | Renamed]] = {"condition.count": "class_token"}
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

    def grammar(self, run: RunConfig) -> Grammar:
        """Return the context of section 3.2 and the positions of algorithm 1."""
        is_speech = run.data.frames is not None
        patches = Patches(patch_size=self.patch_size)
        return Grammar(
            reads=Frames() if is_speech else patches,
            schedule=Context(mask_ratio=self.mask_ratio),
            asks=InContext(given_ratio=self.given_ratio),
            density=Place(),
            condition=LearnedTokens() if self.class_token else None,
            weights=InitialWeights(blocks=self.initial_deviation),
            positions=run.model.positions or "none",
        )
