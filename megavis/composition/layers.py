"""A paper's words, built, and the layers that follow from them.

`build.py` turns each word into tokens, a schedule, an asking kind, a density or a condition.
Nothing here depends on ranks; the interface to the engine is in `trainable.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cached_property, partial
from typing import Any

import torch
from torch import nn

from megavis.composition.asking import Asking
from megavis.composition.build import (
    HeadPlan,
    build_asking,
    build_condition,
    build_density,
    build_initialization,
    build_part,
    build_schedule,
    build_tokens,
    under,
)
from megavis.composition.condition import Condition
from megavis.composition.encoded_image import EncodedImage, PretrainedEncoder
from megavis.composition.parts import PARTS, TRANSFORMED, Part, Role, with_whole_norms
from megavis.composition.reader import Reader, SecondStack
from megavis.composition.tokens import Tokens
from megavis.composition.trainable import Backbone, Likelihood
from megavis.config.schema import RunConfig
from megavis.densities.density import Density
from megavis.grammar.paper import PaperConfig
from megavis.model.core import BLOCKS, MEMORY, Core, StackSpec
from megavis.model.dropout import SAMPLES, carries_samples
from megavis.model.flops import Workload
from megavis.model.modulation import MODULATION
from megavis.model.parameters import set_decay
from megavis.model.positions import PLACES, carried_names
from megavis.model.stack import LayerPlan, block_plans, stacks_of
from megavis.model.visibility import VisibilityKind
from megavis.parallel.context import ParallelContext
from megavis.schedules.schedule import Schedule


class Layers(Backbone):
    """The words of a paper, built; `visibility` replaces the asking kind's."""

    config_type = PaperConfig
    paper: Any

    def __init__(
        self,
        config: RunConfig,
        context: ParallelContext,
        *,
        visibility: VisibilityKind | None = None,
    ) -> None:
        super().__init__(config, context)
        self.grammar = self.paper.grammar(config)
        names = self.carried_names
        stack = StackSpec(
            BLOCKS,
            config.model,
            visibility or self.asks.visibility,
            build_initialization(self.grammar.weights, config.model),
            carried_names=(*names, SAMPLES) if config.drop_path else names,
            drop_path=config.drop_path,
            relative_grid=self.reads.grid if self.grammar.positions == "relative_2d" else None,
        )
        self.core = Core.create(config, context.megatron_groups(), stack)

    # The words, built.

    @cached_property
    def reads(self) -> Tokens:
        """The input tokens."""
        return build_tokens(self.grammar.reads, self.config, under("reads", self.paper.key))

    @cached_property
    def predicts(self) -> Tokens:
        """The predicted tokens."""
        word = self.grammar.predicts
        if word is None:
            return self.reads
        return build_tokens(word, self.config, under("predicts", self.paper.key))

    @cached_property
    def schedule(self) -> Schedule:
        """What is known when each token is predicted."""
        return build_schedule(self.grammar.schedule, self.grammar, self.config, self.reads.grid)

    @cached_property
    def asks(self) -> Asking:
        """Which row predicts a token."""
        return build_asking(self.grammar.asks, self.grammar)

    @cached_property
    def condition(self) -> Condition:
        """What the model is conditioned on."""
        return build_condition(self.grammar, self.config, self.paper.key)

    @cached_property
    def second_stack(self) -> SecondStack | None:
        """The decoder of an encoder that sees some tokens; None for others."""
        if self.grammar.asks.kind != "visible":
            return None
        places = (PLACES,) if self.grammar.density.reads_places else ()
        extras = (*places, *self.extra_tensors)
        return SecondStack(self.core, self.grammar, self.reads.grid, extras)

    @cached_property
    def density(self) -> Density:
        """How a token is predicted, scored and sampled."""
        upper = self.second_stack
        head = HeadPlan(
            core=self.core if upper is None else upper.core,
            predicts=self.predicts,
            num_skipped=self.num_skipped,
            also_return=TRANSFORMED if self.has_transform else None,
            seed=self.config.seed,
        )
        return build_density(self.grammar.density, head)

    @property
    def num_skipped(self) -> int:
        """Leading rows that reach the head and predict nothing."""
        return self.grammar.num_skipped(self.num_tokens)

    @property
    def num_row_vectors(self) -> int:
        """Rows with vectors that modulate them; 0 if they have none."""
        return self.grammar.num_row_vectors(self.num_tokens)

    @property
    def has_transform(self) -> bool:
        """True if the first layer contains a learned, invertible transform of the tokens."""
        return self.grammar.transform is not None

    @property
    def extra_tensors(self) -> tuple[str, ...]:
        """Names of the density's head inputs besides hidden states."""
        return ("noisy",) if self.grammar.density.is_noisy else ()

    @property
    def likelihood(self) -> Likelihood | None:
        """How to convert the loss to -log p of an image's tokens; None if there is none."""
        dimension, size = self.reads.dimension, self.reads.width
        if not self.grammar.is_likelihood or dimension is None:
            return None
        given = self.condition.given_text
        return Likelihood(dimension, self.num_tokens * size, per_loss=size, given=given)

    @property
    def pretrained_key(self) -> str | None:
        """Config key that names the run that the memory's encoder starts from; None without one."""
        memory = self.grammar.memory
        starts = memory is not None and memory.from_run is not None
        return self.paper.key("memory.from_run") if starts else None

    def pretrained(self) -> PretrainedEncoder | None:
        """Open the Vision Transformer that the memory's encoder starts from."""
        memory, condition = self.grammar.memory, self.condition
        if memory is None or memory.from_run is None:
            return None
        assert isinstance(condition, EncodedImage)
        return condition.pretrained(memory.from_run, self.config.model)

    # What follows from them: the first layer, and all layers.

    @property
    def carried_names(self) -> tuple[str, ...]:
        """Names of the tensors that are carried with the hidden states, in order.

        Blocks use visibility and coordinates, and attend to an encoder's `memory`; all
        others pass through to the head. With drop path, `core.carried_names` adds the sample
        indices.
        """
        # A bridge makes the places of the rows above it.
        carries_places = self.grammar.density.reads_places and self.grammar.asks.kind != "visible"
        return (
            *self.asks.extra_tensors,
            *((TRANSFORMED,) if self.has_transform else ()),
            *carried_names(self.grammar.positions),
            *((PLACES,) if carries_places else ()),
            *self.extra_tensors,
            *((MODULATION,) if self.grammar.is_modulated else ()),
            *((MEMORY,) if "encoder" in self.condition.roles else ()),
        )

    @property
    def carries_gradient(self) -> bool:
        """True with a transform, trained by the loss on its tokens, a memory, or modulation."""
        return self.has_transform or "encoder" in self.condition.roles or self.grammar.is_modulated

    def parts(self) -> dict[Role, Part]:
        """Return how to build each part of the first layer."""
        needed = {*self.asks.roles, *self.condition.roles}
        needed |= {"transform"} if self.has_transform else set()
        needed |= {"row_vectors"} if self.num_row_vectors else set()
        needed |= {"row_norm"} if self.grammar.asks.norm else set()
        return {role: partial(self.part, role) for role in PARTS if role in needed}

    def part(self, role: Role) -> nn.Module | nn.Parameter:
        """Build a part of the first layer."""
        conditional = self.condition.part(role, self.core)
        if conditional is not None:
            return conditional
        front, asks = self.asks.num_front, self.grammar.asks
        counts: dict[Role, int] = {"front": front, "row_vectors": self.num_row_vectors}
        counts |= {"front_position": front} if self.grammar.places_front else {}
        built = build_part(role, self.grammar, self.core, self.reads, counts)
        # MAE's code decays the class token in pre-training; in fine-tuning, its `no_weight_decay`
        # exempts it.
        decays = asks.kind == "visible" and asks.tokens_decay and self.config.finetune is None
        if role == "front" and decays:
            assert isinstance(built, nn.Parameter)
            set_decay(built, "always")
        return built

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

    def workload(self) -> Workload:
        """Return the workload of the blocks for one training image."""
        # Any sample will do: the bounds of an arrangement, and so the work, are the same for all.
        arrangement, upper = (
            self.schedule.draw(torch.zeros(1, dtype=torch.int64)),
            self.second_stack,
        )
        width = self.density.num_outputs if upper is None else upper.core.model.hidden_size
        work = self.asks.workload(arrangement, width)
        return replace(
            work,
            num_memory=self.condition.num_memory,
            is_modulated=self.grammar.is_modulated,
        )

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
            self.density.build_head,
            seed,
            depth=len(plans),
            inner=decoder.stack(num_read),
            flops=decoder.flops * num_read,
            gives_features=not upper,
        )
        # Inserted last: depths for layer decay are counted without the encoder, which is at the
        # embedding's depth.
        return [embedding, *encoder, *plans[1:], head]

    def upper_layers(self) -> list[LayerPlan]:
        """Return bridge and blocks of the second stack, if there is one."""
        upper, outputs = self.second_stack, self.density.num_outputs
        return [] if upper is None else upper.layers(outputs, seed=self.config.seed)

    @property
    def num_tokens(self) -> int:
        """Tokens of an image."""
        return self.predicts.num_tokens
