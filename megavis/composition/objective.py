"""Base class of papers with Transformer blocks: sequences, layers and a loss.

An objective does not depend on ranks. It turns a batch into a sequence, builds the layers around
the blocks, and scores the head's output. Its interface to the engine is in `trainable.py`.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property
from typing import Any, ClassVar, final

from torch import Tensor, nn

from megavis.composition.encoder_decoder import SecondStack
from megavis.composition.trainable import Backbone, SequenceBatch, Trainable
from megavis.config.choices import PositionKind
from megavis.config.errors import UserError
from megavis.config.schema import RunConfig
from megavis.data.loading.batch import Batch
from megavis.densities.density import Density
from megavis.model.core import BLOCKS, Core, StackSpec
from megavis.model.dropout import SAMPLES, carries_samples
from megavis.model.flops import Workload
from megavis.model.heads import Head
from megavis.model.init import Initialization
from megavis.model.stack import LayerPlan, block_plans, model_flops, stacks_of
from megavis.model.visibility import VisibilityKind
from megavis.parallel.context import ParallelContext
from megavis.schedules.schedule import Schedule

__all__ = ["Objective", "SequenceBatch"]


class Objective(Trainable, Backbone):
    """A paper, from a batch to a loss.

    Args:
        visibility: replaces the paper's visibility.
    """

    paper: Any
    """The paper's section of the config, an instance of `config_type`."""
    default_positions: ClassVar[PositionKind] = "none"
    """Position encoding if the config does not set one."""

    def __init__(
        self,
        config: RunConfig,
        context: ParallelContext,
        *,
        visibility: VisibilityKind | None = None,
    ) -> None:
        super().__init__(config, context)
        assert isinstance(config.objective, self.config_type)
        self.paper = config.objective
        stack = StackSpec(
            BLOCKS,
            config.model,
            visibility or self.visibility_kind,
            self.initialization(),
            carried_names=(*self.carried_names, SAMPLES)
            if config.drop_path
            else self.carried_names,
            drop_path=config.drop_path,
            relative_grid=self.relative_grid,
        )
        self.core = Core.create(config, context.megatron_groups(), stack)

    @property
    def backbone(self) -> Objective:
        """The objective itself."""
        return self

    @property
    @abstractmethod
    def visibility_kind(self) -> VisibilityKind:
        """Which token attends to which."""

    @property
    def position_kind(self) -> PositionKind:
        """Position encoding: the config's, or the paper's default."""
        return self.config.model.positions or self.default_positions

    @property
    @abstractmethod
    def carried_names(self) -> tuple[str, ...]:
        """Names of the tensors that are carried with the hidden states, in order.

        Blocks use `coordinates`, `content_groups`, `query_groups` and `context`, and attend to an
        encoder's `memory`; all others pass through to the head. With drop path,
        `core.carried_names` adds the sample indices.
        """

    @property
    def relative_grid(self) -> tuple[int, int] | None:
        """Rows and columns of the grid of a relative position bias; None without one."""
        return None

    @property
    @abstractmethod
    def schedule(self) -> Schedule:
        """What is known when each token is predicted."""

    @property
    @abstractmethod
    def density(self) -> Density:
        """How a token is predicted, scored and sampled."""

    @property
    def num_outputs(self) -> int:
        """Outputs of the head per position, summed over all processes."""
        return self.density.num_outputs

    @property
    def weights_need_their_seed(self) -> bool:
        """True if weights are only valid with the `seed` that they were trained with."""
        return False

    @abstractmethod
    def workload(self) -> Workload:
        """Return the workload of the blocks for one image."""

    def flops_per_image(self) -> float:
        """Return the FLOPs of a training step for one image, summed over the layers."""
        return model_flops(self.layer_plans())

    @abstractmethod
    def initialization(self) -> Initialization:
        """Return the initialization of a block's matrices."""

    @abstractmethod
    def build_embedding(self) -> nn.Module:
        """Build the first layer, from `SequenceBatch.inputs` to a `PackedState` of `[s, b, h]`."""

    def build_head(self) -> Head:
        """Build the last layer, from a `PackedState` of `[s, b, h]` to one or more predictions."""
        return self.density.build_head()

    def outputs(self, predictions: Any) -> Tensor:
        """Return the head's output gathered and batch first; see `Density.outputs`."""
        return self.density.outputs(predictions)

    def measures(self, predictions: Any, targets: tuple[Tensor, ...]) -> Mapping[str, Tensor]:
        """Return the density's metrics of a batch, for validation."""
        return self.density.measures(predictions, targets)

    def token_losses(self, predictions: Any, targets: tuple[Tensor, ...]) -> Tensor:
        """Return the loss of each position, float32 `[b, n]`, of a sequential schedule.

        Raises:
            UserError: tokens are not predicted one by one.
        """
        if not self.schedule.is_sequential:
            name = self.config.objective.name
            raise UserError(f"{name} does not predict the patches of an order one by one")
        return self.density.per_token_loss(predictions, targets[0] if targets else None)

    @final
    def feature_inputs(self, batch: Batch) -> tuple[Tensor, ...]:
        """Return `SequenceBatch.inputs` for features of a batch, ignoring its labels.

        Raises:
            UserError: the model has no input for "no class".
        """
        self.check_unlabelled()
        index = batch.sample_index if self.has_random_features else None
        return self.inputs_for_features(batch.inputs, index)

    @abstractmethod
    def inputs_for_features(
        self, inputs: Tensor, sample_index: Tensor | None
    ) -> tuple[Tensor, ...]:
        """Return `SequenceBatch.inputs` for features of samples, hiding no more than needed.

        All tokens of this sequence enter the mean over tokens. Labels are not an argument, since
        features must not contain the answer of a probe.

        Args:
            inputs: samples in the form of the shards (`Batch.inputs`).
            sample_index: int64 `[b]`, which determines random draws; None unless
                `has_random_features`.
        """

    def training_sequence(self, batch: Batch) -> SequenceBatch:
        """Turn a batch into its training sequence, with sample indices if there is drop path."""
        return self.with_samples(self.sequence(batch), batch)

    def with_samples(self, sequence: SequenceBatch, batch: Batch) -> SequenceBatch:
        """Append the sample indices to the inputs, as the first layer expects in training."""
        if not self.core.drop_path:
            return sequence
        return replace(sequence, inputs=(*sequence.inputs, batch.sample_index))

    def layer_plans(self) -> list[LayerPlan]:
        """Return the model: embedding, encoder if there is one, blocks, head."""
        seed, core = self.config.seed, self.core
        build = carries_samples(self.build_embedding) if core.drop_path else self.build_embedding
        embedding = LayerPlan("embedding", build, seed)
        blocks = block_plans(core, self.workload(), seed=seed, depth=1, gives_features=True)
        upper = self.upper_layers()
        plans = [embedding, *blocks, *upper]
        num_read, decoder = stacks_of(plans)[-1].work.num_read, self.density.decoder
        head = LayerPlan(
            "head",
            self.build_head,
            seed,
            depth=len(plans),
            inner=decoder.stack(num_read),
            flops=decoder.flops * num_read,
            gives_features=not upper,
        )
        return [embedding, *self.encoder_layers(), *plans[1:], head]

    @cached_property
    def second_stack(self) -> SecondStack | None:
        """Second stack of blocks, such as MAE's decoder; None without one."""
        return None

    def upper_layers(self) -> list[LayerPlan]:
        """Return bridge and blocks of the second stack, if there is one."""
        upper = self.second_stack
        return [] if upper is None else upper.layers(self.num_outputs, seed=self.config.seed)

    def encoder_layers(self) -> list[LayerPlan]:
        """Return the layers after the first one that encode a condition, if there are any."""
        return []
