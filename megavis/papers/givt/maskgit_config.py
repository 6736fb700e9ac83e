"""Config keys of GIVT-MaskGIT."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from megavis.config.schema import ConfigIssue, Fraction, RunConfig
from megavis.papers.givt.config import LatentTokensConfig


class MaskGITConfig(LatentTokensConfig):
    """Config keys of GIVT-MaskGIT."""

    name: Literal["givt_maskgit"] = "givt_maskgit"
    masked_input: Literal["vector", "zeros"] = "vector"
    """Embedding of a masked token: a learned vector in the released code, the embedding of zeros in
    the paper (section 3.2)."""
    least_masking: Fraction = 0.3
    """The mask ratio is cos(π/2 · u) with u uniform in [0, 1 - least_masking): 0.3 in the released
    code, which masks at least 45 %; not stated in the paper; 0 in MaskGIT."""

    def num_places(self, config: RunConfig) -> int:
        """Return the number of tokens, plus 1 for the label."""
        return super().num_places(config) + 1

    def check(self, config: RunConfig) -> Iterator[ConfigIssue]:
        """Check that the width is even too, for the halves of token and mask."""
        yield from super().check(config)
        if config.model.hidden_size % 2:
            text = f"{config.model.hidden_size} must be even: token and mask take half of it each"
            yield "model.hidden_size", text
