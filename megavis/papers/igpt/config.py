"""iGPT: Generative Pretraining from Pixels (Chen et al., 2020).

An image is a raster sequence of palette ids. The autoregressive objective (section 2.1) predicts
each pixel from those before it; the BERT objective zeroes the embeddings of random pixels and
predicts these from the rest.

Details not in the paper follow the released code: a learned start vector is shifted in, norms have
a gain and no mean subtraction, linear layers have no biases, and the projection to logits is not
tied to the token embedding and initialised to zero (appendix A.1).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from megavis.config.schema import ConfigIssue, Positive, RunConfig
from megavis.config.section import AtLeast0
from megavis.grammar.grammar import Grammar
from megavis.grammar.order import Order
from megavis.grammar.paper import PaperConfig, Renamed
from megavis.grammar.words import Categorical, Colors, InitialWeights, Mask, Masked, OneByOne, Shift


class IGPTConfig(PaperConfig):
    """Config keys of iGPT."""

    names: ClassVar[Mapping[str, str | Renamed]] = {
        "schedule.kind": Renamed("mode", "set it to autoregressive"),
    }

    name: Literal["igpt"] = "igpt"
    mode: Literal["autoregressive", "bert"] = "autoregressive"
    """L_AR or L_BERT of section 2.1."""
    mask_ratio: Annotated[float, Field(gt=0, lt=1)] = 0.15
    """BERT: probability that a pixel is masked."""
    vocabulary_size: Annotated[int, Field(gt=1)] = 512
    """Colours of the palette (section 3.2)."""
    logits_std: AtLeast0 = 0.0
    """Initial standard deviation of the projection to logits. The paper found small gains from 0
    (appendix A.1)."""
    order: Order = "raster"
    """Autoregressive order π of the pixels, the same for all images: `raster`, `nested_raster`,
    `round_robin`, `random` (drawn once per run), or a `.npy` file with the raster index of the
    pixel at each position, whose content is copied into the run's config."""
    order_block: Positive = 4
    """Side of a block in pixels, for `nested_raster` and `round_robin`."""

    def own_faults(self, run: RunConfig) -> Iterator[ConfigIssue]:
        """Yield keys of the autoregressive objective that BERT ignores."""
        if self.mode == "bert" and self.order != "raster":
            text = "belongs to objective.mode autoregressive; set it to raster"
            yield "objective.order", text

    def grammar(self, run: RunConfig) -> Grammar:
        """Return the two objectives of section 2.1.

        BERT masks by zeros (section 2.2), for features and in fine-tuning too (section 4.6). The
        released code has a learned start vector.
        """
        is_causal = self.mode == "autoregressive"
        masked = Masked(mask_ratio=self.mask_ratio, features="masked")
        order = OneByOne(order=self.order, drawn="run", order_block=self.order_block)
        return Grammar(
            reads=Colors(vocabulary_size=self.vocabulary_size),
            schedule=order if is_causal else masked,
            asks=Shift() if is_causal else Mask(filler="zero_embedding"),
            density=Categorical(head_std=self.logits_std),
            weights=InitialWeights(blocks="gpt", positions=0.01),
            positions=run.model.positions or "learned",
        )
