"""The keys of MP3, and what must hold between them and the others."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from megavis.config.schema import Complaint, Fraction, ObjectiveConfig, RunConfig
from megavis.config.section import Above0
from megavis.objectives.layout_checks import check_patches, check_tokens

_ADDED = ("learned", "sincos")


class MP3Config(ObjectiveConfig):
    """The keys of MP3."""

    has_relative_positions: ClassVar[bool] = True
    takes_frames: ClassVar[bool] = True

    name: Literal["mp3"] = "mp3"
    mask_ratio: Fraction = 0.75
    """η: share of the patches that give no keys and values (section 3.2)."""
    given_ratio: Fraction = 0.0
    """Share of the patches, all of them context, that are told where they stand (section 4.3:
    0.05 for speech); `model.positions` says how."""
    patch_size: Annotated[int, Field(gt=0)] = 16
    """Side of a patch in pixels (table 1); a frame of a spectrogram is a patch of its own."""
    initial_deviation: Above0 = 0.02
    """Deviation of the blocks' matrices at the start; DeiT's (section 4.2) suits widths from 384,
    narrow networks want about 0.7 / √hidden_size."""
    class_token: bool = True
    """A learned token in front of the patches, which all of them see (section 3.1)."""

    def grid(self, config: RunConfig) -> tuple[int, int]:
        """Return rows and columns of places: patches of an image, or one row of frames."""
        if config.data.frames is not None:
            return 1, config.data.frames[0]
        side = config.data.image_size // self.patch_size
        return side, side

    def check(self, config: RunConfig) -> Iterator[Complaint]:
        """Want whole patches, no positions, and tokens that sequence parallelism can share."""
        yield from check_patches(config, self.patch_size)
        yield from self._check_positions(config)
        rows, columns = self.grid(config)
        num_tokens = rows * columns + self.class_token
        culprit = "objective.class_token" if self.class_token else "it"
        yield from check_tokens(
            config, num_tokens, what=f"{num_tokens} tokens", remedy=f"set {culprit} to false"
        )

    def tells_all(self, config: RunConfig) -> bool:
        """True where all patches may know where they stand: in plain fine-tuning (section 3.3)."""
        return config.finetune is not None and not config.finetune.generative_weight

    def _check_positions(self, config: RunConfig) -> Iterator[Complaint]:
        """Positions come with fine-tuning, before it for the patches that are told."""
        kind = config.model.positions or "none"
        if self.given_ratio and kind not in _ADDED and not self.tells_all(config):
            text = f"{self.given_ratio} of the patches are told where they stand; model.positions"
            yield "objective.given_ratio", f"{text} must say how: learned or sincos"
        if self.given_ratio >= 1.0 - self.mask_ratio and self.given_ratio:
            text = f"{self.given_ratio} leaves no context that does not know its place"
            yield "objective.given_ratio", f"{text}; lower it, or objective.mask_ratio"
        if kind == "none":
            return
        if not self.given_ratio and not self.tells_all(config):
            yield "model.positions", f"{kind} tells what the model has to find out; leave it out"
        elif kind not in (*_ADDED, "relative_2d"):
            known = "learned, sincos, relative_2d or none"
            yield "model.positions", f"{kind} is not for sets of patches; use {known}"
