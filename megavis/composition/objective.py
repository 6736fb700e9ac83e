"""The choices that define a paper with Transformer blocks, and the layers derived from them.

A paper chooses the tokens that it reads and predicts, a schedule (what is known when), an asking
kind (which row predicts a token), a density (how a token is predicted), a condition (what else is
known), and the parts of its first layer. Sequences, loss, features and generation are derived in
`composition.py`. Nothing here depends on ranks; the interface to the engine is in `trainable.py`.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cached_property, partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from megavis.composition.asking import Asking
from megavis.composition.condition import Condition
from megavis.composition.encoded_tokens import TokenIds
from megavis.composition.parts import PARTS, TRANSFORMED, Part, Role, with_whole_norms
from megavis.composition.reader import Reader, SecondStack
from megavis.composition.tokens import Colors, Patches, Tokens
from megavis.composition.trainable import Backbone, SequenceBatch
from megavis.config.errors import UserError
from megavis.config.schema import RunConfig
from megavis.config.section import PositionKind
from megavis.data.loading.loader import Batch
from megavis.densities.density import Density
from megavis.model.core import BLOCKS, MEMORY, Core, StackSpec
from megavis.model.dropout import SAMPLES, carries_samples
from megavis.model.embeddings import grid_positions
from megavis.model.flops import Workload
from megavis.model.heads import Head
from megavis.model.parameters import Initialization, filled, normal, vision_transformer
from megavis.model.positions import carried_names
from megavis.model.stack import LayerPlan, block_plans, model_flops, stacks_of
from megavis.model.visibility import VisibilityKind
from megavis.parallel.context import ParallelContext
from megavis.schedules.schedule import Schedule


class Objective(Backbone):
    """A paper, defined by its choices; `visibility` replaces that of the asking kind."""

    default_positions: ClassVar[PositionKind] = "none"
    """Position encoding if the config does not set one."""
    transform_key: ClassVar[str] = "objective.transform"
    """Config key of a learned transform of the tokens, for messages."""

    def __init__(
        self,
        config: RunConfig,
        context: ParallelContext,
        *,
        visibility: VisibilityKind | None = None,
    ) -> None:
        super().__init__(config, context)
        stack = StackSpec(
            BLOCKS,
            config.model,
            visibility or self.asks.visibility,
            self.initialization(),
            carried_names=(*self.carried_names, SAMPLES)
            if config.drop_path
            else self.carried_names,
            drop_path=config.drop_path,
            relative_grid=self.relative_grid,
        )
        self.core = Core.create(config, context.megatron_groups(), stack)

    # The choices.

    @property
    @abstractmethod
    def reads(self) -> Tokens:
        """The input tokens."""

    @property
    def predicts(self) -> Tokens:
        """The predicted tokens, by default the input tokens."""
        return self.reads

    @property
    @abstractmethod
    def schedule(self) -> Schedule:
        """What is known when each token is predicted."""

    @property
    @abstractmethod
    def asks(self) -> Asking:
        """Which row predicts a token."""

    @property
    @abstractmethod
    def density(self) -> Density:
        """How a token is predicted, scored and sampled."""

    @cached_property
    def condition(self) -> Condition:
        """What the model is conditioned on, by default nothing."""
        return Condition()

    @cached_property
    def second_stack(self) -> SecondStack | None:
        """Second stack of blocks, such as MAE's decoder; None without one."""
        return None

    @property
    def has_transform(self) -> bool:
        """True if the first layer contains a learned, invertible transform of the tokens."""
        return False

    @property
    def deviations(self) -> Mapping[Role, float]:
        """Initial standard deviation of learned positions and vectors, where it is not 0.02."""
        return {}

    @property
    def extra_tensors(self) -> tuple[str, ...]:
        """Names of the density's head inputs besides hidden states."""
        return ()

    @property
    def relative_grid(self) -> tuple[int, int] | None:
        """Rows and columns of the grid of a relative position bias; None without one."""
        return None

    @property
    def weights_need_their_seed(self) -> bool:
        """True if weights are only valid with the `seed` that they were trained with."""
        return False

    def initialization(self) -> Initialization:
        """Return the initialization of a block's matrices, by default that of MAE's code."""
        return vision_transformer()

    # Their keys are those of a section of the config, by default the paper's.

    def patches(self, keys: Any = None) -> Patches:
        """Return patches of `patch_size`² pixels."""
        size = (keys or self.paper).patch_size
        return Patches(image_size=self.config.data.image_size, patch_size=size)

    def ids(self, keys: Any = None, *, section: str = "objective") -> TokenIds:
        """Return ids of `tokenizer`, one per patch of `patch_size`² pixels."""
        keys, size = keys or self.paper, self.config.data.image_size
        return TokenIds(
            image_size=size,
            side=size // keys.patch_size,
            vocabulary_size=keys.vocabulary_size,
            tokenizer=keys.tokenizer,
            section=section,
        )

    def colours(self, keys: Any = None, *, section: str = "objective") -> Colors:
        """Return ids of a palette of `vocabulary_size` colours."""
        data, count = self.config.data, (keys or self.paper).vocabulary_size
        windows = data.crop == "window"
        return Colors(
            image_size=data.image_size, vocabulary_size=count, windows=windows, section=section
        )

    # What follows from them: the first layer, and all layers.

    @property
    def position_kind(self) -> PositionKind:
        """Position encoding: the config's, or the paper's default."""
        return self.config.model.positions or self.default_positions

    @property
    def carried_names(self) -> tuple[str, ...]:
        """Names of the tensors that are carried with the hidden states, in order.

        Blocks use those of visibility and coordinates, and attend to an encoder's `memory`; all
        others pass through to the head. With drop path, `core.carried_names` adds the sample
        indices.
        """
        return (
            *self.asks.extra_tensors,
            *((TRANSFORMED,) if self.has_transform else ()),
            *carried_names(self.position_kind),
            *self.extra_tensors,
            *((MEMORY,) if "encoder" in self.condition.roles else ()),
        )

    @property
    def carries_gradient(self) -> bool:
        """True with a transform, trained by the loss on its tokens, or an encoder's memory."""
        return self.has_transform or "encoder" in self.condition.roles

    def parts(self) -> dict[Role, Part]:
        """Return how to build each part of the first layer."""
        needed = {*self.asks.roles, *self.condition.roles}
        needed |= {"transform"} if self.has_transform else set()
        return {role: partial(self.part, role) for role in PARTS if role in needed}

    def part(self, role: Role) -> nn.Module | nn.Parameter:
        """Build a part of the first layer."""
        conditional = self.condition.part(role, self.core)
        if conditional is not None:
            return conditional
        fill = normal(self.deviations.get(role, 0.02))
        if role == "content":
            return self.reads.embedding(self.core)
        if role in ("positions", "asked_positions"):
            return grid_positions(self.core, self.position_kind, self.reads.grid, fill=fill)
        assert role not in ("transform", "encoder"), f"the paper builds its {role}"
        counts: dict[Role, tuple[int, ...]] = {"marks": (2,), "front": (self.asks.num_front,)}
        return filled(*counts.get(role, ()), self.core.model.hidden_size, fill=fill)

    def build_embedding(self) -> nn.Module:
        """Build the first layer, from `SequenceBatch.inputs` to a `PackedState` of `[s, b, h]`."""
        return Reader(
            self.core,
            self.asks,
            self.parts(),
            seed=self.config.seed,
            conditions=self.condition.roles,
            extras=self.extra_tensors,
        )

    def build_head(self) -> Head:
        """Build the last layer, from a `PackedState` of `[s, b, h]` to one or more predictions."""
        return self.density.build_head()

    def workload(self) -> Workload:
        """Return the workload of the blocks for one training image."""
        plan, upper = self.schedule.draw(torch.zeros(1, dtype=torch.int64)), self.second_stack
        width = self.density.num_outputs if upper is None else upper.core.model.hidden_size
        work = self.asks.workload(plan, width)
        return replace(work, num_memory=self.condition.num_memory)

    def flops_per_image(self) -> float:
        """Return the FLOPs of a training step for one image, summed over the layers."""
        return model_flops(self.layer_plans())

    def layer_plans(self) -> list[LayerPlan]:
        """Return the model: embedding, encoder if there is one, blocks, head."""
        seed, core, work = self.config.seed, self.core, self.workload()
        build: Callable[[], nn.Module] = partial(with_whole_norms, self.build_embedding)
        build = carries_samples(build) if self.config.drop_path else build
        embedding = LayerPlan("embedding", build, seed)
        encoder = self.condition.layers(core, num_rows=work.num_tokens, seed=seed)
        blocks = block_plans(core, work, seed=seed, depth=1, gives_features=True)
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
        return [embedding, *encoder, *plans[1:], head]

    def upper_layers(self) -> list[LayerPlan]:
        """Return bridge and blocks of the second stack, if there is one."""
        upper, outputs = self.second_stack, self.density.num_outputs
        return [] if upper is None else upper.layers(outputs, seed=self.config.seed)

    # Training and features.

    def outputs(self, predictions: Any) -> Tensor:
        """Return the head's output gathered and batch first; see `Density.outputs`."""
        return self.density.outputs(predictions)

    @property
    def measures_accuracy(self) -> bool:
        """True if the density has one."""
        return self.density.measures_accuracy

    def measures(self, predictions: Any, targets: tuple[Tensor, ...]) -> Mapping[str, Tensor]:
        """Return the density's metrics of a batch, for validation."""
        return self.density.measures(predictions, targets)

    def token_losses(self, predictions: Any, targets: tuple[Tensor, ...]) -> Tensor:
        """Return the loss of each position, `[b, n]`; raise UserError unless sequential."""
        if not self.schedule.is_sequential:
            name = self.config.objective.name
            raise UserError(f"{name} does not predict the patches of an order one by one")
        return self.density.per_token_loss(predictions, targets[0] if targets else None)

    def with_samples(self, sequence: SequenceBatch, batch: Batch) -> SequenceBatch:
        """Append the sample indices to the inputs, as the first layer expects in training."""
        if not self.config.drop_path:
            return sequence
        return replace(sequence, inputs=(*sequence.inputs, batch.sample_index))
