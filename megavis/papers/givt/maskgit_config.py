"""The keys of GIVT-MaskGIT, besides those that it shares with the causal model."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from megavis.config.schema import ConfigIssue, Fraction, RunConfig
from megavis.papers.givt.config import LatentTokensConfig


class MaskGITConfig(LatentTokensConfig):
    """GIVT-MaskGIT."""

    name: Literal["givt_maskgit"] = "givt_maskgit"
    masked_input: Literal["vector", "zeros"] = "vector"
    """In place of a masked token: a learned vector in the released code, the embedding of
    zeros in the paper (section 3.2)."""
    least_masking: Fraction = 0.3
    """The share of masked tokens is cos(π/2 · u), u uniform in [0, 1 - this): 0.3 in the released
    code, which masks at least 45 %; the paper names none, and MaskGIT's own 0."""

    def num_places(self, config: RunConfig) -> int:
        """Return the tokens and the label in front of them."""
        return super().num_places(config) + 1

    def check(self, config: RunConfig) -> Iterator[ConfigIssue]:
        """Check that token and mask can take half of the width each."""
        yield from super().check(config)
        if config.model.hidden_size % 2:
            text = f"{config.model.hidden_size} must be even: token and mask take half of it each"
            yield "model.hidden_size", text
