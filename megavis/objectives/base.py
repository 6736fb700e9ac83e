"""What an objective owes: one paper, in terms of sequences, layers and a loss.

An objective knows nothing of ranks. It turns a batch into a sequence, names the layers around the
blocks, and scores what the head gives.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol, runtime_checkable

from torch import Tensor, nn

from megavis.config.schema import ObjectiveConfig, RunConfig
from megavis.data.batch import Batch
from megavis.data.manifest import Manifest
from megavis.model.core import Block, Core
from megavis.model.init import Initialization
from megavis.model.stack import LayerPlan
from megavis.model.visibility import Kind
from megavis.parallel.context import ParallelContext


@dataclass(frozen=True)
class Sequence:
    """An image as the model sees it.

    Attributes:
        inputs: what the first layer takes; every tensor has the batch as its first dimension.
        targets: what the loss takes besides the head's output, likewise.
    """

    inputs: tuple[Tensor, ...]
    targets: tuple[Tensor, ...]


class Objective(ABC):
    """One paper's way from a batch to a loss."""

    config_type: ClassVar[type[ObjectiveConfig]]

    def __init__(self, config: RunConfig, context: ParallelContext) -> None:
        self.config = config
        self.core = Core.create(
            config,
            groups=context.megatron_groups(),
            initialization=self.initialization(),
            visibility_kind=self.visibility_kind,
        )

    @property
    @abstractmethod
    def visibility_kind(self) -> Kind:
        """Which token sees which."""

    @property
    @abstractmethod
    def num_tokens(self) -> int:
        """Places of the sequence."""

    @property
    @abstractmethod
    def num_outputs(self) -> int:
        """Numbers that the head gives for each place, over all processes."""

    @abstractmethod
    def check_data(self, manifest: Manifest) -> Iterator[str]:
        """Yield what is wrong with shards of this kind for this config, a sentence each."""

    @abstractmethod
    def initialization(self) -> Initialization:
        """Return how the matrices of a block start."""

    @abstractmethod
    def build_embedding(self) -> nn.Module:
        """Return the first layer: `Sequence.inputs` to `[s, b, h]`."""

    @abstractmethod
    def build_head(self) -> nn.Module:
        """Return the last layer: `[s, b, h]` to predictions."""

    @abstractmethod
    def sequence(self, batch: Batch) -> Sequence:
        """Turn a batch into a sequence; random draws depend on seed and sample alone."""

    @abstractmethod
    def loss(self, predictions: Tensor, targets: tuple[Tensor, ...]) -> Tensor:
        """Score the head's output; a float32 scalar, the mean over the images."""

    @abstractmethod
    def outputs(self, predictions: Tensor) -> Tensor:
        """Turn the head's output into the paper's own form, whole and batch first."""

    @abstractmethod
    def inputs_from(self, inputs: Any, **conditions: Any) -> tuple[Tensor, ...]:
        """Return `Sequence.inputs` for a user's own inputs in the paper's form."""

    def layer_plans(self) -> list[LayerPlan]:
        """Return the model: embedding, blocks, head."""
        seed, core = self.config.seed, self.core
        embedding = LayerPlan("embedding", nn.Module, self.build_embedding, seed)
        head = LayerPlan("head", nn.Module, self.build_head, seed)
        blocks = [
            LayerPlan(f"blocks.{i}", Block, _block_factory(core, i), seed)
            for i in range(self.config.model.num_layers)
        ]
        return [embedding, *blocks, head]


@runtime_checkable
class TokenByToken(Protocol):
    """What an objective offers besides, where its sequences can be generated id by id."""

    @property
    def num_tokens(self) -> int:
        """Places of the sequence."""

    def inputs_at(self, ids: Tensor, start: int, stop: int) -> tuple[Tensor, ...]:
        """Return the inputs of the places [start, stop), given the ids before `stop - 1`."""

    def outputs(self, predictions: Tensor) -> Tensor:
        """Return logits `[b, places, v]` of the ids at these places."""

    def to_order(self, raster: Tensor) -> Tensor:
        """Put ids `[b, n]` from raster order into the order of generation."""

    def to_raster(self, ordered: Tensor) -> Tensor:
        """Put ids `[b, n]` from the order of generation into raster order."""


def _block_factory(core: Core, index: int) -> Any:
    return lambda: Block(core, index + 1)
