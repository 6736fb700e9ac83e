"""The shape of a model for planning: sizes, tokens, parameters, activations of its ends.

Blocks are the same for every paper, so what they keep for the backward pass is arithmetic
(`activation_memory.py`). Embedding, head and loss are the paper's own, and are measured
(`boundary_activations.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from megavis.composition.objective import Objective
from megavis.config.errors import UserError
from megavis.config.schema import RunConfig
from megavis.model.flops import Workload
from megavis.model.parts import stacks_of
from megavis.model.stack import PlannedStack
from megavis.model.visibility import VisibilityKind
from megavis.planning.boundary_activations import DTYPES, BoundaryActivations
from megavis.planning.layouts import Layout, LayoutKey
from megavis.planning.parameters import Layers, ModelPart, PipelineStage, count_parameters, parts_of


@dataclass(frozen=True)
class StackShape:
    """One stack of equal blocks as planning sees it.

    Attributes:
        num_layers: blocks.
        hidden_size: width of the residual stream.
        mlp_size: width of the MLP.
        num_heads: attention heads.
        work: tokens of an image, by what is computed for them.
        visibility: who sees whom; of the tokens of `work.num_memory`, all do.
        is_rotary: queries and keys are rotated by their positions.
        is_layer_norm: norms subtract the mean.
        mlp_dropout: something is dropped inside the MLP.
        residual_dropouts: parts of a block whose result is dropped from, 0 to 3.
        mlp_gradients: gradients of the MLP's width that its activation function has at once.
        is_alone: the model computes nothing else but maps of tokens.
        may_split_tokens: sequence parallelism divides its tokens.
        number_size: bytes of a number in the compute precision.
        num_passing: see `PlannedStack`.
    """

    num_layers: int
    hidden_size: int
    mlp_size: int
    num_heads: int
    work: Workload
    visibility: VisibilityKind
    is_rotary: bool
    is_layer_norm: bool
    mlp_dropout: bool
    residual_dropouts: int
    mlp_gradients: int
    is_alone: bool
    may_split_tokens: bool
    number_size: int
    num_passing: int

    @classmethod
    def of(cls, stack: PlannedStack, precision: str, *, is_alone: bool) -> StackShape:
        """Return the shape of a stack that computes in this precision.

        Args:
            stack: of the model.
            precision: of its numbers.
            is_alone: see there.
        """
        model = stack.core.model
        has_memory = stack.work.num_memory > 0
        return cls(
            num_layers=model.num_layers,
            hidden_size=model.hidden_size,
            mlp_size=model.mlp_size,
            num_heads=model.num_attention_heads,
            work=stack.work,
            visibility=stack.core.visibility_kind,
            is_rotary="coordinates" in stack.core.carried_names,
            is_layer_norm=model.normalization == "layer_norm",
            mlp_dropout=bool(model.mlp_dropout),
            residual_dropouts=(1 + has_memory) * bool(model.residual_dropout)
            + bool(model.hidden_dropout),
            mlp_gradients=2 if model.activation == "quick_gelu" else 1,
            is_alone=is_alone,
            may_split_tokens=stack.core.stack.may_split_tokens,
            number_size=number_size(precision),
            num_passing=stack.num_passing,
        )

    def token_parts(self, layout: Layout) -> int:
        """Return into how many parts a layout cuts its residual stream."""
        return layout.token_parts if self.may_split_tokens else 1


@dataclass(frozen=True)
class ModelShape:
    """A model as planning sees it.

    Attributes:
        layers: parameters.
        parts: by name.
        stacks: of blocks, from below.
        decoder: the stack inside the last layer.
        precision: `float32`, `bf16` or `fp16`.
        gradient_size: bytes of a number in the averages of gradients over processes.
        keeps_average: a moving average of the weights is kept.
        ends: what layers that are no blocks keep, in every way in which they may run.
        flops: operations of a training step for one image, recomputation not counted.
    """

    layers: Layers
    parts: tuple[ModelPart, ...]
    stacks: tuple[StackShape, ...]
    decoder: StackShape | None
    precision: str
    gradient_size: int
    keeps_average: bool
    ends: Mapping[LayoutKey, BoundaryActivations]
    flops: float

    @property
    def number_size(self) -> int:
        """Bytes of a number in the compute precision."""
        return number_size(self.precision)

    @property
    def is_alone(self) -> bool:
        """True where one stack is all that computes, besides maps of tokens."""
        return all(stack.is_alone for stack in self.stacks)

    @property
    def main_stack(self) -> StackShape:
        """The stack with most work."""
        return max(
            self.stacks,
            key=lambda stack: stack.num_layers * stack.hidden_size**2 * stack.work.num_tokens,
        )

    def blocks_of(self, stage: PipelineStage) -> list[tuple[StackShape, int]]:
        """Return the stacks of which a stage has blocks, and how many, inside layers or not."""
        every = [*zip(self.stacks, stage.blocks, strict=True)]
        if self.decoder is not None and stage.is_last:
            every.append((self.decoder, self.decoder.num_layers))
        return [(stack, count) for stack, count in every if count]


def shape_of(objective: Objective, ends: Mapping[LayoutKey, BoundaryActivations]) -> ModelShape:
    """Measure the model of an objective, in a context of one process, without allocating it.

    Args:
        objective: the paper.
        ends: of its model, for the layouts that are to be planned.
    """
    config, plans = objective.config, objective.layer_plans()
    inner, matrices = plans[-1].inner, count_parameters(objective)
    stacks = stacks_of(plans)
    is_alone = len(stacks) == 1 and not any(plan.own_flops for plan in plans)

    def shape(stack: PlannedStack) -> StackShape:
        return StackShape.of(stack, config.training.precision, is_alone=is_alone)

    return ModelShape(
        layers=Layers.of(matrices, plans),
        parts=tuple(parts_of(matrices, plans)),
        stacks=tuple(shape(stack) for stack in stacks),
        decoder=None if inner is None else shape(inner),
        precision=config.training.precision,
        gradient_size=_gradient_size(config),
        keeps_average=bool(config.optimizer.ema_decay),
        ends=ends,
        flops=objective.flops_per_image(),
    )


def number_size(precision: str) -> int:
    """Return the bytes of a number in a compute precision."""
    return DTYPES[precision].itemsize


def _gradient_size(config: RunConfig) -> int:
    training = config.training
    return 4 if training.reduce_precision == "float32" else number_size(training.precision)


def require_blocks(config: RunConfig) -> None:
    """Refuse what planning has no arithmetic for.

    Raises:
        UserError: the config has no Transformer, or fine-tunes one.
    """
    if not config.objective.has_blocks:
        name = config.objective.name
        raise UserError(
            f"a {name} has no Transformer blocks to lay out; it trains data-parallel, so start it"
            " on as many GPUs as divide training.batch_size"
        )
    if config.finetune is not None:
        raise UserError("plans are of pre-training; leave the finetune section away")
