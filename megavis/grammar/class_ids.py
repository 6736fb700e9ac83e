"""Config keys shared by papers that predict the ids of an image given its class."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, ClassVar

from pydantic import Field

from megavis.config.schema import Fraction, Positive
from megavis.grammar.paper import PaperConfig, Renamed
from megavis.grammar.words import Ids


class ClassIdsConfig(PaperConfig):
    """Config keys of a class-conditional model of a tokenizer's ids."""

    names: ClassVar[Mapping[str, str | Renamed]] = {"condition.dropout": "label_dropout"}

    patch_size: Positive = 16
    """Side in pixels of the square that an id represents."""
    vocabulary_size: Annotated[int, Field(gt=1)]
    """Entries of the tokenizer's codebook."""
    tokenizer: str | None = None
    """Run folder of the tokenizer, which encodes images and decodes samples; training on ids shards
    needs none."""
    num_classes: Positive = 1000
    """Number of classes."""
    label_dropout: Fraction = 0.1
    """Probability of the null label in training; 0 disables guidance and features."""

    def ids(self) -> Ids:
        """Return the tokens that are read and predicted."""
        size, name = self.vocabulary_size, self.tokenizer
        return Ids(patch_size=self.patch_size, vocabulary_size=size, tokenizer=name)
