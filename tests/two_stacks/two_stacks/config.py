"""The keys of a model with two stacks."""

from typing import Literal

from megavis.papers.igpt.config import IGPTConfig


class TwoStacksConfig(IGPTConfig):
    """Those of iGPT."""

    name: Literal["two_stacks"] = "two_stacks"
    upper_size: int = 16
    upper_layers: int = 2
