"""The shape of a model for planning: sizes, tokens, parameters, measured activations."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, replace

from megavis.composition.trainable import Trainable
from megavis.config.errors import UserError
from megavis.config.schema import RunConfig
from megavis.model.flops import Workload
from megavis.model.stack import PlannedStack, stacks_of
from megavis.model.visibility import VisibilityKind
from megavis.parallel.device import DTYPES
from megavis.planning.activations import ModelActivations
from megavis.planning.frozen_networks import FrozenNetwork
from megavis.planning.layouts import Layout, LayoutKey
from megavis.planning.parameters import (
    Layers,
    ModelPart,
    count_parameters,
    parts_of,
    trained_only,
)
from megavis.tokenizers.network_tokenizer import FrozenEncoder


@dataclass(frozen=True)
class StackShape:
    """A stack of equal blocks for planning.

    Attributes:
        num_layers: number of blocks.
        hidden_size: width of the residual stream.
        mlp_size: width of the MLP.
        mlp_input_size: width before its activation.
        block_parameters: in the matrices of a block, without cross-attention.
        num_heads: attention heads.
        work: tokens per image, by computation.
        visibility: attention mask; tokens of `work.num_memory` are always visible.
        is_rotary: whether queries and keys are rotated.
        may_split_tokens: whether sequence and context parallelism apply.
        number_size: bytes per element in the compute precision.
        num_passing: see `PlannedStack`.
        is_fp8: whether the blocks multiply their matrices in FP8.
        drops_inside: whether the MLP has dropout after its activation.
        carries: whether blocks carry tensors other than hidden states.
    """

    num_layers: int
    hidden_size: int
    mlp_size: int
    mlp_input_size: int
    block_parameters: int
    num_heads: int
    work: Workload
    visibility: VisibilityKind
    is_rotary: bool
    may_split_tokens: bool
    number_size: int
    num_passing: int
    is_fp8: bool
    drops_inside: bool
    carries: bool

    @classmethod
    def of(cls, stack: PlannedStack, precision: str) -> StackShape:
        """Return the shape of a planned stack in a compute precision."""
        model = stack.core.model
        return cls(
            num_layers=model.num_layers,
            hidden_size=model.hidden_size,
            mlp_size=model.mlp_size,
            mlp_input_size=model.mlp_input_size,
            block_parameters=model.block_parameters,
            num_heads=model.num_attention_heads,
            work=stack.work,
            visibility=stack.core.visibility_kind,
            is_rotary="coordinates" in stack.core.carried_names,
            may_split_tokens=stack.core.stack.may_split_tokens,
            number_size=number_size(precision),
            num_passing=stack.num_passing,
            is_fp8=stack.core.config.training.fp8,
            drops_inside=model.mlp_dropout > 0,
            carries=bool(stack.core.carried_names),
        )

    @property
    def in_bf16(self) -> StackShape:
        """The same stack without FP8."""
        return replace(self, is_fp8=False)

    @property
    def chooses(self) -> bool:
        """Whether only chosen tokens have keys and values."""
        return self.visibility in ("two_stream", "context")

    def multiplies_parts(self, layout: Layout) -> bool:
        """Return whether projections of chosen tokens multiply parts of the weight.

        Context parallelism and FP8 project all tokens and choose afterwards.
        """
        return self.chooses and self.context_parts(layout) == 1 and not self.is_fp8

    def context_parts(self, layout: Layout) -> int:
        """Return the number of parts into which context parallelism splits the tokens."""
        return layout.context if self.may_split_tokens else 1

    def is_sequence_parallel(self, layout: Layout) -> bool:
        """Return whether tokens are split over the tensor group."""
        return layout.parallel.sequence_parallel and self.may_split_tokens

    def token_parts(self, layout: Layout) -> int:
        """Return the number of parts into which the residual stream is split by tokens."""
        return layout.parallel.token_parts if self.may_split_tokens else 1

    def parts(self, layout: Layout) -> int:
        """Return the number of parts of attention, by heads, and of the MLP."""
        return layout.tensor * self.context_parts(layout)


@dataclass(frozen=True)
class ModelShape:
    """A model for planning.

    Attributes:
        layers: parameters by layer.
        trained: number of parameters that are not frozen.
        optimizer: algorithm of the optimizer.
        parts: parameters by name of the part.
        stacks: stacks of blocks, from bottom to top.
        decoder: the stack inside the last layer, if any.
        precision: `float32`, `bf16` or `fp16`.
        gradient_size: bytes per element in the all-reduce of gradients.
        keeps_average: whether an EMA of the weights is kept.
        activations: activations of its layers, by kind of layout.
        flops: operations of a training step per image, without recomputation and without the head
            of fine-tuning; frozen blocks have no backward pass.
        fp8_share: fraction of the operations in FP8.
        frozen: networks that encode images before the passes of each micro-batch.
        uncounted: such networks that do not exist yet, and are therefore not counted.
    """

    layers: Layers
    trained: Layers
    optimizer: str
    parts: tuple[ModelPart, ...]
    stacks: tuple[StackShape, ...]
    decoder: StackShape | None
    precision: str
    gradient_size: int
    keeps_average: bool
    activations: Mapping[LayoutKey, ModelActivations]
    flops: float
    fp8_share: float
    frozen: tuple[FrozenNetwork, ...] = ()
    uncounted: tuple[FrozenEncoder, ...] = ()

    @property
    def number_size(self) -> int:
        """Bytes per element in the compute precision."""
        return number_size(self.precision)

    # `megavis plan` asks for these in each of thousands of layouts.
    @functools.cached_property
    def head_flops(self) -> float:
        """Operations of the head of fine-tuning in a training step per image."""
        return max((each.head_flops for each in self.activations.values()), default=0.0)

    @property
    def total_flops(self) -> float:
        """Operations of a training step per image, the head of fine-tuning included."""
        return self.flops + self.head_flops

    @functools.cached_property
    def main_stack(self) -> StackShape:
        """The stack with the most work."""
        return max(
            self.stacks,
            key=lambda stack: stack.num_layers * stack.hidden_size**2 * stack.work.num_tokens,
        )

    def decoder_in(self, layout: Layout) -> StackShape | None:
        """Return the decoder with the positions of one process of a context group."""
        if self.decoder is None or layout.context == 1:
            return self.decoder
        work, parts = self.decoder.work, layout.context
        work = replace(
            work,
            num_tokens=work.num_tokens // parts,
            num_visible=work.num_visible // parts,
            num_read=work.num_read // parts,
        )
        return replace(self.decoder, work=work)

    def busiest_blocks(self, layout: Layout) -> list[tuple[StackShape, int]]:
        """Return the stacks with blocks on the busiest stage, with counts, a decoder included."""
        stage = self.layers.busiest(layout.pipeline)
        every = [*zip(self.stacks, stage.blocks, strict=True)]
        decoder = self.decoder_in(layout)
        if decoder is not None and stage.is_last:
            every.append((decoder, decoder.num_layers))
        return [(stack, count) for stack, count in every if count]


def shape_of(objective: Trainable, activations: Mapping[LayoutKey, ModelActivations]) -> ModelShape:
    """Return the shape of a model without allocating it, in a single-process context."""
    config, plans = objective.config, objective.layer_plans()
    training = config.training
    inner, matrices = plans[-1].inner, count_parameters(objective)
    return ModelShape(
        layers=Layers.of(matrices, plans),
        trained=Layers.of(trained_only(matrices), plans),
        optimizer=config.optimizer.algorithm,
        parts=tuple(parts_of(matrices, plans)),
        stacks=tuple(StackShape.of(stack, training.precision) for stack in stacks_of(plans)),
        decoder=None if inner is None else StackShape.of(inner, training.precision),
        precision=training.precision,
        gradient_size=number_size(
            "float32" if training.reduce_precision == "float32" else training.precision
        ),
        keeps_average=bool(config.optimizer.ema_decay),
        activations=activations,
        flops=objective.flops_per_image(),
        fp8_share=objective.fp8_share(),
    )


def number_size(precision: str) -> int:
    """Return the bytes per element of a compute precision."""
    return DTYPES[precision].itemsize


def require_blocks(config: RunConfig) -> None:
    """Raise UserError if the config has no Transformer to plan."""
    if not config.objective.has_blocks:
        name = config.objective.name
        raise UserError(
            f"a {name} has no Transformer blocks to plan; it trains data-parallel, so start it"
            " on as many GPUs as divide training.batch_size"
        )
