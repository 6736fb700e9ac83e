"""RandAR: Decoder-only Autoregressive Visual Generation in Random Orders (Pang et al., 2024).

The ids of an image are predicted one by one in a random order, given its class. Each token is
preceded by a position instruction token, which holds its place, so that an ordinary causal decoder
predicts in any order (section 3.2), and generation can ask for several places at once (section
3.3).

Details not in the paper follow the released code, whose model is LlamaGen's: an instruction is a
learned vector, rotated by its place as queries and keys are; all matrices are initialised with a
standard deviation of 0.02, and the projection to logits with zeros; and queries and keys of the
class, which has no place, are zeros.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from megavis.config.schema import RunConfig
from megavis.config.section import ROTARY
from megavis.grammar.class_ids import ClassIdsConfig
from megavis.grammar.grammar import Grammar
from megavis.grammar.words import Categorical, InitialWeights, Instruct, Labels, OneByOne


class RandARConfig(ClassIdsConfig):
    """Config keys of RandAR."""

    name: Literal["randar"] = "randar"
    vocabulary_size: Annotated[int, Field(gt=1)] = 16_384
    """Entries of the tokenizer's codebook: 16,384 in LlamaGen's, 1,024 in MaskGIT's."""
    order: Literal["random", "raster"] = "random"
    """Order of the tokens: drawn for each image, or raster order, the released code's baseline."""

    def grammar(self, run: RunConfig) -> Grammar:
        """Return the model of section 3."""
        positions = run.model.positions or "rope_2d"
        return Grammar(
            reads=self.ids(),
            schedule=OneByOne(order=self.order),
            asks=Instruct(zero_start=positions in ROTARY),
            density=Categorical(head_std=0.0),
            condition=Labels(num_classes=self.num_classes, dropout=self.label_dropout),
            weights=InitialWeights(blocks=0.02),
            positions=positions,
        )
