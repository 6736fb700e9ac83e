"""Interface of an objective: one paper, in terms of sequences, layers and a loss.

An objective knows nothing of ranks. It turns a batch into a sequence, names the layers around the
blocks, and scores what the head gives. `trainable.py` has its interface to the engine.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property
from typing import Any, ClassVar, final

from torch import Tensor, nn

from megavis.composition.second_stack import SecondStack
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
from megavis.model.parts import block_plans, model_flops, stacks_of
from megavis.model.stack import LayerPlan
from megavis.model.visibility import VisibilityKind
from megavis.parallel.context import ParallelContext
from megavis.schedules.schedule import Schedule

__all__ = ["Objective", "SequenceBatch"]


class Objective(Trainable, Backbone):
    """One paper's way from a batch to a loss."""

    paper: Any
    """The paper's section of the config, of its `config_type`."""
    default_positions: ClassVar[PositionKind] = "none"
    """Position encoding, unless the config says otherwise."""

    def __init__(
        self,
        config: RunConfig,
        context: ParallelContext,
        *,
        visibility: VisibilityKind | None = None,
    ) -> None:
        """Build.

        Args:
            config: of the run.
            context: ranks and groups of this process.
            visibility: which token sees which, in place of the paper's own.
        """
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
        """This itself."""
        return self

    @property
    @abstractmethod
    def visibility_kind(self) -> VisibilityKind:
        """Visibility: which token attends to which."""

    @property
    def position_kind(self) -> PositionKind:
        """Position encoding: the config's, or the paper's default."""
        return self.config.model.positions or self.default_positions

    @property
    @abstractmethod
    def carried_names(self) -> tuple[str, ...]:
        """Names of the tensors that travel with the hidden states, in the order of `Stream`.

        Blocks know `coordinates`, `content_groups`, `query_groups` and `context`, and attend to the
        `memory` of an encoder; what else is named goes through to the head. The samples' numbers
        are not named here: where the config has a drop path, `core.carried_names` adds them.
        """

    @property
    def relative_grid(self) -> tuple[int, int] | None:
        """Rows and columns of the grid on which attention has a bias for each offset."""
        return None

    @property
    @abstractmethod
    def schedule(self) -> Schedule:
        """What is known when."""

    @property
    @abstractmethod
    def density(self) -> Density:
        """How a token is predicted, scored and drawn."""

    @property
    def num_outputs(self) -> int:
        """Numbers that the head gives for each place, over all processes."""
        return self.density.num_outputs

    @property
    def weights_need_their_seed(self) -> bool:
        """True where weights mean something only with the `seed` that they were trained with."""
        return False

    @abstractmethod
    def workload(self) -> Workload:
        """Return what blocks compute for an image, for the count of operations."""

    def flops_per_image(self) -> float:
        """Return the operations of a training step for one image, by the list of layers."""
        return model_flops(self.layer_plans())

    @abstractmethod
    def initialization(self) -> Initialization:
        """Return how the matrices of a block start."""

    @abstractmethod
    def build_embedding(self) -> nn.Module:
        """Return the first layer: `SequenceBatch.inputs` to the `State` of `[s, b, h]`."""

    def build_head(self) -> Head:
        """Return the last layer: the `State` of `[s, b, h]` to one or several predictions."""
        return self.density.build_head()

    def outputs(self, predictions: Any) -> Tensor:
        """Return the head's output whole and batch first, as the density has it."""
        return self.density.outputs(predictions)

    def measures(self, predictions: Any, targets: tuple[Tensor, ...]) -> Mapping[str, Tensor]:
        """Return other numbers of a batch that validation records: those of the density."""
        return self.density.measures(predictions, targets)

    def token_losses(self, predictions: Any, targets: tuple[Tensor, ...]) -> Tensor:
        """Return the loss of each position, float32 `[b, n]`, where each predicts one token.

        Raises:
            UserError: the tokens are not predicted one by one.
        """
        if not self.schedule.is_sequential:
            name = self.config.objective.name
            raise UserError(f"{name} does not predict the patches of an order one by one")
        return self.density.per_token_loss(predictions, targets[0] if targets else None)

    @final
    def feature_inputs(self, batch: Batch) -> tuple[Tensor, ...]:
        """Return `SequenceBatch.inputs` for features of a batch, whose labels are not read.

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

        Every token of this sequence counts in a mean over tokens. A class is not among the
        arguments, since features must not hold the answer that a probe reads off them.

        Args:
            inputs: what the shards hold (`Batch.inputs`).
            sample_index: int64 `[b]`, which drives random draws; None unless
                `has_random_features` declares that there are any.
        """

    def training_sequence(self, batch: Batch) -> SequenceBatch:
        """Turn a batch into its sequence, with what drop path is drawn by."""
        return self.with_samples(self.sequence(batch), batch)

    def with_samples(self, sequence: SequenceBatch, batch: Batch) -> SequenceBatch:
        """Add the samples' numbers to the inputs, which the first layer takes in training alone."""
        if not self.core.drop_path:
            return sequence
        return replace(sequence, inputs=(*sequence.inputs, batch.sample_index))

    def layer_plans(self) -> list[LayerPlan]:
        """Return the model: embedding, an encoder where there is one, blocks, head."""
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
        """Blocks of another width above those that see what is known; None: there are none."""
        return None

    def upper_layers(self) -> list[LayerPlan]:
        """Return bridge and blocks of the second stack, where there is one."""
        upper = self.second_stack
        return [] if upper is None else upper.layers(self.num_outputs, seed=self.config.seed)

    def encoder_layers(self) -> list[LayerPlan]:
        """Return the layers above the first one that encode a condition, where there are any."""
        return []
