"""MP3: Position Prediction as an Effective Pretraining Strategy (Zhai et al., 2022).

An image is a set of patches without positions. All patches are queries, and a random share 1 - η of
them, the context, provides keys and values (section 3.2). A linear head predicts the position of
every patch, inside and outside the context (algorithm 1).

Algorithm 1 keeps η of the patches as context; the text keeps 1 - η, which is followed here. The
class token comes first (section 3.1 and appendix A). The paper does not say whether patches attend
to it; here they do at every η.

For speech, the frames of a spectrogram are the patches, and the positions of a few of them are
given (section 4.3). The paper does not say whether these count in the loss; here they do not.

Legend: n patches.
"""

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

    name: Literal["mp3"] = "mp3"
    mask_ratio: Fraction = 0.75
    """η: share of the patches without keys and values (section 3.2)."""
    given_ratio: Fraction = 0.0
    """Share of the patches, within the context, whose position is given, encoded by
    `model.positions` (section 4.3; 0.05 for speech)."""
    patch_size: Annotated[int, Field(gt=0)] = 16
    """Side of a patch in pixels (table 1); a frame of a spectrogram is one patch."""
    initial_deviation: Above0 = 0.02
    """Initial standard deviation of the blocks' matrices. DeiT's value (section 4.2) suits widths
    of 384 and above; narrower networks need about 0.7 / √hidden_size."""
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
