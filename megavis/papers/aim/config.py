"""AIM: Scalable Pre-training of Large Autoregressive Image Models (El-Nouby et al., 2024).

An image is a raster sequence of patches, each predicted from those before it (section 4.1). The
first patches, a prefix whose length is drawn for each image, attend to each other and are not
predicted, so that features can be read with full attention (section 4.2, "Prefix Transformer"). An
MLP head predicts the normalised pixels of the next patch, and is dropped afterwards.

Details not in the paper follow the released code: embedded patches are normalised, and norms and
the patch embedding have biases. That code has no head for pixels. Two details are unpublished: the
positions added before the head (here those of the row's own patch), and how the trunk's width is
mapped to the head's (here by a linear map). Initial weights are those of MAE's code, to which the
released patch embedding refers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import ClassVar, Literal

from megavis.config.schema import ConfigIssue, Positive, RunConfig
from megavis.config.section import Section
from megavis.grammar.grammar import Grammar
from megavis.grammar.order import Order
from megavis.grammar.paper import PaperConfig, Renamed
from megavis.grammar.words import OneByOne, Patches, Shift, SquaredError


class PixelHead(Section):
    """The head: residual MLPs on each patch alone (section 4.2, tables 3e and 4)."""

    num_layers: Positive = 12
    """Number of blocks, each a norm and an MLP."""
    hidden_size: Positive = 2048
    """Width of the blocks; hidden layers are four times as wide."""
    positions: bool = True
    """Add sin-cos positions before the first block."""


class AIMConfig(PaperConfig):
    """Config keys of AIM."""

    names: ClassVar[Mapping[str, str | Renamed]] = {
        "schedule.prefix": Renamed("attention", "use smaller patches"),
        "reads.embedding_norm": "normalize_embedding",
        "density.normalize": "normalize_targets",
        "density.decoder": Renamed("head", "give objective.head a width and layers"),
        "density.decoder_layers": "head.num_layers",
        "density.decoder_width": "head.hidden_size",
        "density.decoder_positions": "head.positions",
    }

    name: Literal["aim"] = "aim"
    patch_size: Positive = 14
    """Side of a patch in pixels, 14 in all models."""
    attention: Literal["prefix", "causal"] = "prefix"
    """Attention in pre-training (table 3d). `prefix`: causal, but full within a prefix, whose
    length is drawn for each image, uniformly from 1 to all patches but one."""
    order: Order = "raster"
    """Order of the patches, the same for all images (table 3b): `raster`, `random` (drawn once per
    run), or the raster index of the patch at each position, as a list or a `.npy` file."""
    normalize_targets: bool = True
    """Standardise each target patch by its own mean and standard deviation (table 3a)."""
    normalize_embedding: bool = True
    """Normalise embedded patches, as the released code does; not in the paper."""
    head: PixelHead | None = PixelHead()
    """The MLP head; null: a linear map (table 3e)."""

    def own_faults(self, run: RunConfig) -> Iterator[ConfigIssue]:
        """Yield orders that the paper does not have."""
        if self.order in ("nested_raster", "round_robin"):
            text = f"{self.order} is not an order of this paper"
            yield "objective.order", f"{text}; set it to raster or random, or list the patches"

    def grammar(self, run: RunConfig) -> Grammar:
        """Return the model of section 4."""
        error = SquaredError(normalize=self.normalize_targets)
        if self.head is not None:
            error = SquaredError(
                normalize=self.normalize_targets,
                decoder="mlp",
                decoder_layers=self.head.num_layers,
                decoder_width=self.head.hidden_size,
                decoder_positions=self.head.positions,
            )
        prefix: Literal["drawn", 1] = "drawn" if self.attention == "prefix" else 1
        return Grammar(
            reads=Patches(patch_size=self.patch_size, embedding_norm=self.normalize_embedding),
            schedule=OneByOne(order=self.order, drawn="run", prefix=prefix),
            asks=Shift(place="content", start=False),
            density=error,
            positions=run.model.positions or "sincos",
        )
