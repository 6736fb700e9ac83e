"""What planning has to know of a model: sizes, tokens, parameters, and what its ends keep.

Blocks are the same for every paper, so what they keep for the backward pass is arithmetic
(`activations.py`). Embedding, head and loss are the paper's own, and are measured (`ends.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from megavis.config.errors import UserError
from megavis.config.schema import RunConfig
from megavis.model.flops import Workload
from megavis.model.parts import stacks_of
from megavis.model.stack import PlannedStack
from megavis.model.visibility import Kind
from megavis.objectives.base import Objective
from megavis.planning.ends import DTYPES, Ends
from megavis.planning.layouts import Way
from megavis.planning.parameters import Layers, Stage, count_parameters


@dataclass(frozen=True)
class StackShape:
    """One stack of equal blocks as planning sees it.

    Attributes:
        num_layers: blocks.
        hidden_size: width of the residual stream.
        mlp_size: width of the MLP.
        num_heads: attention heads.
        work: tokens of an image, by what is computed for them.
        visibility: who sees whom.
        is_rotary: queries and keys are turned by where they stand.
        is_layer_norm: norms subtract the mean.
        mlp_dropout: something is dropped inside the MLP.
        residual_dropouts: halves of a block whose result is dropped from, 0 to 2.
        number_size: bytes of a number in the compute precision.
    """

    num_layers: int
    hidden_size: int
    mlp_size: int
    num_heads: int
    work: Workload
    visibility: Kind
    is_rotary: bool
    is_layer_norm: bool
    mlp_dropout: bool
    residual_dropouts: int
    number_size: int

    @classmethod
    def of(cls, stack: PlannedStack, precision: str) -> StackShape:
        """Return the shape of a stack that computes in this precision."""
        model = stack.core.model
        return cls(
            num_layers=model.num_layers,
            hidden_size=model.hidden_size,
            mlp_size=model.mlp_size,
            num_heads=model.num_attention_heads,
            work=stack.work,
            visibility=stack.core.visibility_kind,
            is_rotary="coordinates" in stack.core.carries,
            is_layer_norm=model.normalization == "layer_norm",
            mlp_dropout=bool(model.mlp_dropout),
            residual_dropouts=bool(model.residual_dropout) + bool(model.hidden_dropout),
            number_size=number_size(precision),
        )


@dataclass(frozen=True)
class ModelShape:
    """A model as planning sees it.

    Attributes:
        layers: parameters.
        stacks: of blocks, from below.
        precision: `float32`, `bf16` or `fp16`.
        gradient_size: bytes of a number in the averages of gradients over processes.
        keeps_average: a moving average of the weights is kept.
        ends: what layers that are no blocks keep, in every way in which they may run.
        flops: operations of a training step for one image, recomputation not counted.
    """

    layers: Layers
    stacks: tuple[StackShape, ...]
    precision: str
    gradient_size: int
    keeps_average: bool
    ends: Mapping[Way, Ends]
    flops: float

    @property
    def number_size(self) -> int:
        """Bytes of a number in the compute precision."""
        return number_size(self.precision)

    @property
    def main_stack(self) -> StackShape:
        """The stack with most work."""
        return max(
            self.stacks,
            key=lambda stack: stack.num_layers * stack.hidden_size**2 * stack.work.num_tokens,
        )

    def blocks_of(self, stage: Stage) -> list[tuple[StackShape, int, bool]]:
        """Return the stacks of which a stage has blocks, how many, and whether the last one."""
        every = zip(self.stacks, stage.blocks, stage.tops, strict=True)
        return [(stack, count, is_top) for stack, count, is_top in every if count]


def shape_of(objective: Objective, ends: Mapping[Way, Ends]) -> ModelShape:
    """Measure the model of an objective, in a context of one process, without allocating it.

    Args:
        objective: the paper.
        ends: of its model, for the layouts that are to be planned.

    Raises:
        UserError: its blocks attend to an encoder, which the arithmetic of plans leaves out.
    """
    config, plans = objective.config, objective.layer_plans()
    stacks = stacks_of(plans)
    if any(stack.work.num_memory for stack in stacks):
        raise UserError(
            f"plans leave out encoders, and {config.objective.name} has one; `megavis params`"
            " counts its parameters"
        )
    return ModelShape(
        layers=Layers.of(count_parameters(objective), plans),
        stacks=tuple(StackShape.of(stack, config.training.precision) for stack in stacks),
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
