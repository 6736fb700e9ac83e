"""RAR: Randomized Autoregressive Visual Generation (Yu et al., 2024).

The ids of an image are predicted one by one, given its class. An image is in a random order with a
probability that falls from 1 to 0 during training, and otherwise in raster order (section 3.2).
Each row has the position of the token that it holds and, from a separate table, of the token that
it predicts ("target-aware positional embedding", section 3.2).

Details not in the paper follow the released code: a learned token precedes the class; norms are
modulated (section 4.1, "adaLN") by the class and a learned vector for each row; and logits have a
bias. Queries and keys are normalised by `model.qk_norm` (section 4.1). Differences from the code:

- it adds a separate vector to the class token; here, the vectors of the class and of the rows
  include it, which gives the same functions;
- the last norm has a gain and a bias here, where the code has only the modulation, whose matrix
  does not decay there;
- the learned token starts at N(0, 0.02²) and does not decay, where it starts at 0 and decays there.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from megavis.config.schema import ConfigIssue, RunConfig
from megavis.config.section import Portion
from megavis.grammar.class_ids import ClassIdsConfig
from megavis.grammar.grammar import Grammar
from megavis.grammar.order import Order
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
    """Start and end of annealing, as fractions of the training: all orders are random up to the
    start and none from the end on; in between, their share r falls linearly (equation 5). The paper
    uses epochs 200 and 300 of 400; [0, 0] has no random orders and [1, 1] only those (table 2)."""
    order: Order = "raster"
    """Order after annealing (table 3): `raster`, or the raster index of the token at each position,
    as a list or a `.npy` file."""
    class_token: bool = True
    """Begin with a learned token before the class, as the released code does; not in the paper."""
    adaptive_norms: Literal["none", "class", "class_and_row"] = "class_and_row"
    """Modulate norms and branches (section 4.1, "adaLN"; not in the ablations) by the class, or by
    the class and a vector for each row, as the released code does."""

    def own_faults(self, run: RunConfig) -> Iterator[ConfigIssue]:
        """Yield orders that the paper does not have."""
        if self.order in ("nested_raster", "round_robin", "random"):
            text = f"{self.order} is not an order of this paper"
            yield "objective.order", f"{text}; set it to raster, or list the tokens"

    def grammar(self, run: RunConfig) -> Grammar:
        """Return the model of section 3."""
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
