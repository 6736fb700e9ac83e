"""RAR: Randomized Autoregressive Visual Generation (Yu et al., 2024).

Ids of an image are predicted one by one, given its class. An image is in a random order with a
probability that falls from 1 to 0 in the course of training, and else in raster order (section
3.2). Each row has the position of the token that it holds, and, from a table of its own, of the one
that it predicts ("target-aware positional embedding", section 3.2).

Details not in the paper follow the released code: a learned token precedes the class; what
modulates norms (section 4.1, "adaLN") is the class and a learned vector of each row; and logits
have a bias. Queries and keys are normalised by `model.qk_norm` (section 4.1). Two things differ
from the code. The vector that it adds to the class as a token is part of the class's vector and of
the vectors of rows here, which gives the same functions. And the last norm has a gain and a bias,
where it has only the modulation.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, ClassVar, Literal

from pydantic import BeforeValidator, Field

from megavis.config.schema import ConfigIssue, RunConfig
from megavis.config.section import Portion
from megavis.grammar.class_ids import ClassIdsConfig
from megavis.grammar.grammar import Grammar
from megavis.grammar.order import read_order
from megavis.grammar.paper import Renamed
from megavis.grammar.words import (
    Categorical,
    InitialWeights,
    Labels,
    OneByOne,
    Shift,
)


class RARConfig(ClassIdsConfig):
    """Config keys of RAR."""

    names: ClassVar[Mapping[str, str | Renamed]] = {
        **ClassIdsConfig.names,
        "schedule.anneal": "randomness",
        "asks.sink": "class_token",
        "condition.modulation": Renamed("adaptive_norms", "set it to none"),
    }

    name: Literal["rar"] = "rar"
    vocabulary_size: Annotated[int, Field(gt=1)] = 1024
    """Entries of the tokenizer's codebook, 1,024 in MaskGIT's VQGAN."""
    randomness: Annotated[tuple[Portion, Portion], Field(strict=False)] = (0.5, 0.75)
    """Parts of the training up to which all orders are random, and from which on none is; the share
    r falls linearly between them (equation 5). In the paper epochs 200 and 300 of 400; [0, 0]: no
    random orders, [1, 1]: nothing else (table 2)."""
    order: Annotated[
        str | Annotated[tuple[int, ...], Field(strict=False)], BeforeValidator(read_order)
    ] = "raster"
    """Order to which they converge (table 3): `raster`, or the raster index of the token at each
    position, as a list or a `.npy` file."""
    class_token: bool = True
    """Begin with a learned token before the class, as the released code does; not in the paper."""
    adaptive_norms: Literal["none", "class", "class_and_row"] = "class_and_row"
    """Modulate norms and branches (section 4.1, "adaLN"; ablations have none) by the class, or by
    the class and a vector of each row, as the released code does."""

    def own_faults(self, run: RunConfig) -> Iterator[ConfigIssue]:
        """Yield orders that the paper does not have."""
        if self.order in ("nested_raster", "round_robin", "random"):
            text = f"{self.order} is no order of this paper"
            yield "objective.order", f"{text}; set it to raster, or list the tokens"

    def grammar(self, run: RunConfig) -> Grammar:
        """Return section 3 in words."""
        return Grammar(
            reads=self.ids(),
            schedule=OneByOne(order=self.order, anneal=self.randomness),
            asks=Shift(place="both", sink=self.class_token),
            density=Categorical(bias=True),
            condition=Labels(
                num_classes=self.num_classes,
                dropout=self.label_dropout,
                modulation=self.adaptive_norms,
            ),
            weights=InitialWeights(blocks=0.02),
            positions=run.model.positions or "learned",
        )
