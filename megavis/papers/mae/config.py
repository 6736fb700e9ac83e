"""MAE: Masked Autoencoders Are Scalable Vision Learners (He et al., 2021).

An encoder sees a random quarter of the patches. A narrower decoder takes its output and mask tokens
at the positions of the other patches, and predicts their pixels (section 3). Tokens need not be
unshuffled: they have position embeddings, and full attention is permutation-equivariant.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from megavis.config.schema import Positive, RunConfig
from megavis.grammar.boundaries import MaskShape
from megavis.grammar.grammar import Grammar
from megavis.grammar.paper import PaperConfig, Renamed
from megavis.grammar.words import (
    Context,
    DecoderConfig,
    LearnedTokens,
    Patches,
    SquaredError,
    Visible,
)


class MAEConfig(PaperConfig):
    """Config keys of MAE."""

    generates: ClassVar[bool] = False
    names: ClassVar[Mapping[str, str | Renamed]] = {
        "schedule.kind": Renamed("patch_size", "set it to half of data.image_size or less"),
        "condition.count": "class_token",
        "schedule.shape": "mask_shape",
    }

    name: Literal["mae"] = "mae"
    patch_size: Positive = 16
    """Side of a patch in pixels."""
    mask_ratio: Annotated[float, Field(gt=0, lt=1)] = 0.75
    """Share of the patches hidden from the encoder (section 3)."""
    mask_shape: MaskShape = "tokens"
    """Hide random patches, random blocks or a grid (figure 6, table 1f). The code of the last two
    is not released: blocks are BEiT's, cut to the same number of patches in every image, and a grid
    shows the same place of each square of 2 × 2 patches, drawn for each image."""
    normalize_targets: bool = True
    """Standardise each target patch by its own mean and standard deviation (table 1d)."""
    class_token: bool = True
    """Prepend a learned token to the patches (section 3)."""
    tokens_decay: bool = True
    """Apply weight decay to the class and mask tokens in pre-training, as the released code does,
    where they have three dimensions; not stated in the paper. They never decay in fine-tuning."""
    decoder: DecoderConfig = DecoderConfig()
    """The decoder, used only in pretraining (section 3, table 1)."""

    def num_patches(self, run: RunConfig) -> int:
        """Return the number of patches of an image."""
        return (run.data.image_size // self.patch_size) ** 2

    def grammar(self, run: RunConfig) -> Grammar:
        """Return the masking, encoder, decoder and loss of section 3."""
        return Grammar(
            reads=Patches(patch_size=self.patch_size),
            schedule=Context(mask_ratio=self.mask_ratio, shape=self.mask_shape),
            asks=Visible(decoder=self.decoder, tokens_decay=self.tokens_decay),
            density=SquaredError(normalize=self.normalize_targets),
            condition=LearnedTokens() if self.class_token else None,
            positions=run.model.positions or "sincos",
        )
