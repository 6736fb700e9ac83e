"""A run made of released weights, before it is written.

Legend: b images, H and W pixels.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from megavis.config.schema import ObjectiveConfig, RunConfig
from megavis.tokenizers.palette import Palette

Compared = Iterable[tuple[Tensor, Tensor]]
"""Pairs of outputs of equal shapes: ours, and those of the released network."""


class OpenedRun(Protocol):
    """The written run on one process, as `megavis.load` returns it."""

    config: RunConfig
    objective: Any

    def features(self, inputs: Any, layer: int | None = None) -> Tensor:
        """Return pooled features of a layer."""

    def outputs(self, inputs: Any, **options: Any) -> Tensor:
        """Return what the head predicts."""


@dataclass(frozen=True)
class ReleasedRun:
    """The config sections and weights of a run, and a comparison with the released network.

    Attributes:
        objective: the paper's section.
        weights: whole, by megavis's names.
        sections: further config sections, such as `model`.
        validates: the sections require `data.validation`.
        compare: runs both networks on random input; None: the released one cannot be run here.
        compared: what `compare` compares, for the command's message.
    """

    objective: ObjectiveConfig
    weights: Mapping[str, Tensor]
    image_size: int
    sections: Mapping[str, Any] = field(default_factory=dict)
    validates: bool = False
    palette: Palette | None = None
    compare: Callable[[OpenedRun], Compared] | None = None
    compared: str = "outputs"


def random_images(side: int) -> Tensor:
    """Return two images uint8 `[2, side, side, 3]`, always the same."""
    generator = torch.Generator().manual_seed(0)
    return torch.randint(256, (2, side, side, 3), generator=generator, dtype=torch.uint8)
