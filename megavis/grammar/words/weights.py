"""Initial weights.

Legend: h hidden size.
"""

from __future__ import annotations

from typing import Literal

from megavis.config.section import Above0, Section

Deviation = Above0 | Literal["width"]
"""A standard deviation; `width`: 1/√h."""


class InitialWeights(Section):
    """Initial values; a number is the standard deviation of a normal distribution."""

    blocks: Above0 | Literal["xavier", "gpt", "lecun"] = "xavier"
    """Matrices of the blocks. `xavier`: all Xavier-uniform, as in MAE's released code. `gpt`: as in
    iGPT's, scaled by width and depth for attention and 0.02 for MLPs. `lecun`: as in GIVT's,
    LeCun-normal for attention and Xavier-uniform for MLPs."""
    vectors: Literal["xavier", "lecun"] = "xavier"
    """The map that embeds real-valued tokens."""
    positions: Deviation = 0.02
    """Learned positions."""
    tokens: Deviation = 0.02
    """Learned tokens: start, query, mask and front tokens, and class embeddings."""
