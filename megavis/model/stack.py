"""The model as a list of layers, for every engine: stacks of blocks, and bridges between them.

With one pipeline stage the list is an ordinary module; with several, DeepSpeed's `PipelineModule`
takes the same list. Each layer is seeded by its name, so its weights do not depend on which process
builds it or on the order of building. Stacks may differ in width, heads, visibility and number of
tokens. FLOPs and the division into pipeline stages are derived from the list.

Legend: b images, s tokens, h hidden size of the lower stack, w hidden size of the upper stack.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, Protocol, cast

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from megavis.model.core import Block, Core
from megavis.model.embeddings import LastNorm, ReplicatedLinear, to_stream
from megavis.model.flops import Workload, forward_flops, fp8_flops
from megavis.model.layer_state import LayerState, PackedState
from megavis.model.parameters import Fill, ParamGroupOptions, add_options, xavier_uniform
from megavis.parallel.random import seeded

Predictions = Tensor | tuple[Tensor, ...]
"""Output of a head: one or several tensors."""

Loss = Callable[[Any, tuple[Tensor, ...]], Tensor]
"""Maps the last layer's output and the targets to a scalar."""


class FeatureLayer(Protocol):
    """A layer that can provide features."""

    @property
    def core(self) -> Core:
        """The layer's core, whose config defines what features are."""

    @property
    def feature_norm(self) -> nn.Module:
        """The norm of the residual stream, called once per forward pass."""


def watch_features(layer: nn.Module, keep: Callable[[Tensor], None]) -> RemovableHandle:
    """Call `keep` with the features `[s, b, h]` of a `FeatureLayer` in every forward pass."""
    watched = cast(FeatureLayer, layer)

    def hook(_: nn.Module, entering: tuple[Tensor, ...], output: Tensor) -> None:
        keep(entering[0] if watched.core.model.features == "blocks" else output)

    return watched.feature_norm.register_forward_hook(hook)


Phase = Literal["once", "step"]
"""When a layer runs in generation: once per image, or in every step."""


# Compare by identity: `distinct_layers` groups by stack, and two stacks may have equal sizes.
@dataclass(frozen=True, eq=False)
class PlannedStack:
    """A stack of equal blocks.

    Attributes:
        work: workload of its blocks, and of the head or bridge above them, for an image.
        num_passing: values per image that are carried through its blocks, with a gradient, to the
            stack above.
    """

    core: Core
    work: Workload
    num_passing: int = 0

    @property
    def flops(self) -> float:
        """FLOPs of the forward pass for one image."""
        return forward_flops(self.core.model, self.work)


@dataclass(frozen=True)
class LayerPlan:
    """Specification of a layer."""

    name: str
    """Prefix of its parameter names, for example `blocks.3`."""
    factory: Callable[[], nn.Module]
    seed: int
    """The run's seed."""
    depth: int = 0
    """Depth for layer-wise learning rate decay, from 0."""
    options: ParamGroupOptions = ParamGroupOptions()
    """Optimizer options of the layer, combined with those that its parameters declare."""
    stack: PlannedStack | None = None
    """The stack of a block; None for any other layer."""
    inner: PlannedStack | None = None
    """A stack inside this layer, which a pipeline does not divide: a decoder in the last layer."""
    flops: float = 0.0
    """FLOPs of the forward pass for one image that no stack's workload includes."""
    gives_features: bool = False
    """Whether the layer's norm provides features; see `FeatureLayer`."""
    phase: Phase = "step"
    variant: tuple[str, ...] = ()
    """How a block differs from others of its stack besides drop rates, such as being frozen."""
    handed: list[Any] | None = field(default=None, compare=False)
    """What lower layers hand to this one besides hidden states, in the order in which they ran:
    tensors, or tuples of them. The layer clears the list in every forward pass."""

    @property
    def own_flops(self) -> float:
        """FLOPs of the forward pass for one image, without `stack`."""
        return self.flops + (0.0 if self.inner is None else self.inner.flops)

    def build(self) -> nn.Module:
        """Build the layer, with initial weights determined by its name and the seed."""
        # By name rather than by index, so that initial weights do not depend on a second stack or
        # on pipeline stages.
        with seeded(self.seed, "weights", self.name):
            layer = self.factory()
        add_options(layer.parameters(), self.options)
        return layer


def build_layers(plans: Iterable[LayerPlan], built: Callable[[nn.Module], object]) -> nn.ModuleList:
    """Build layers; `built` is called with each before the next one is built."""
    layers = nn.ModuleList()
    for plan in plans:
        layers.append(plan.build())
        built(layers[-1])
    return layers


class LayerStack(nn.Module):
    """All layers in one process, and the loss."""

    def __init__(
        self,
        plans: Sequence[LayerPlan],
        loss: Loss,
        *,
        built: Callable[[nn.Module], object] = lambda layer: None,
    ) -> None:
        """Build the layers; `built` is called with each layer before the next one is built."""
        super().__init__()
        self.layers = build_layers(plans, built)
        self.loss = loss

    def forward(self, inputs: tuple[Tensor, ...], targets: tuple[Tensor, ...]) -> Tensor:
        """Return the scalar loss of one micro-batch."""
        state: PackedState = inputs
        for layer in self.layers:
            state = layer(state)
        return self.loss(state, targets)


@dataclass(frozen=True)
class LocalLayers:
    """The layers that this process holds, independent of the engine."""

    plans: Sequence[LayerPlan]
    modules: Sequence[nn.Module]

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield parameters under their layout-independent names."""
        for plan, module in zip(self.plans, self.modules, strict=True):
            for name, parameter in module.named_parameters():
                yield f"{plan.name}.{name}", parameter

    def of_phase(self, phase: Phase) -> list[nn.Module]:
        """Return the layers of a phase, from bottom to top."""
        pairs = zip(self.plans, self.modules, strict=True)
        return [module for plan, module in pairs if plan.phase == phase]

    def feature_layers(self) -> list[nn.Module]:
        """Return the layers that provide features (`FeatureLayer`), from bottom to top."""
        pairs = zip(self.plans, self.modules, strict=True)
        return [module for plan, module in pairs if plan.gives_features]

    def up_to_features(self) -> Sequence[nn.Module]:
        """Return the layers up to the last feature layer; empty if there is none."""
        ends = (i for i, plan in enumerate(self.plans, 1) if plan.gives_features)
        return self.modules[: max(ends, default=0)]

    def named_buffers(self) -> Iterator[tuple[str, Tensor]]:
        """Yield persistent buffers under their layout-independent names."""
        for plan, module in zip(self.plans, self.modules, strict=True):
            # `named_buffers` lists buffers that are not persistent too; only `state_dict` tells
            # them apart.
            kept = module.state_dict(keep_vars=True)
            for name, buffer in module.named_buffers():
                if name in kept:
                    yield f"{plan.name}.{name}", buffer


class Bridge(nn.Module):
    """Connects two stacks: the final norm of the lower one, and a linear map to the upper width.

    Under sequence and context parallelism it gathers all tokens on every process, and splits its
    output again.
    """

    def __init__(self, below: Core, above: Core, fill: Fill = xavier_uniform) -> None:
        super().__init__()
        self.below, self.above = below, above
        self.norm = LastNorm(below)
        self.linear = ReplicatedLinear(below.model.hidden_size, above.model.hidden_size, fill)

    @property
    def core(self) -> Core:
        """The core of the lower stack."""
        return self.below

    @property
    def feature_norm(self) -> LastNorm:
        """The final norm of the lower stack."""
        return self.norm

    def forward(self, state: PackedState) -> PackedState:
        """Map `[s, b, h]` to `[s', b, w]`, with the tensors that the upper stack carries."""
        stream = LayerState.unpack(state, self.below.carried_names)
        hidden = self.linear(self.norm.whole(stream.hidden))
        hidden, carried = self.enter(hidden, stream.carried)
        named = {name: carried[name] for name in self.above.carried_names}
        return LayerState(to_stream(hidden, self.above), named).pack()

    def enter(
        self, hidden: Tensor, carried: Mapping[str, Tensor]
    ) -> tuple[Tensor, Mapping[str, Tensor]]:
        """Return the tokens `[b, s', w]` of the upper stack, and the tensors that it carries.

        Override to add mask tokens and positions.

        Args:
            hidden: `[b, s, w]`, complete on every process.
        """
        return hidden, carried


def block_plans(
    core: Core,
    work: Workload,
    *,
    seed: int,
    depth: int,
    deepens: bool = True,
    gives_features: bool = False,
    phase: Phase = "step",
    num_passing: int = 0,
) -> list[LayerPlan]:
    """Return the blocks of a stack.

    Args:
        work: workload of an image; `num_outputs` are the outputs per token of the head or bridge
            above the stack.
        depth: depth of the first block; see `LayerPlan`.
        deepens: whether depth increases from block to block.
    """
    stack = PlannedStack(core, work, num_passing)
    return [
        LayerPlan(
            f"{core.stack.name}.{i}",
            partial(Block, core, i + 1),
            seed,
            depth + i * deepens,
            stack=stack,
            gives_features=gives_features,
            phase=phase,
        )
        for i in range(core.model.num_layers)
    ]


def stacks_of(plans: Iterable[LayerPlan]) -> list[PlannedStack]:
    """Return the stacks of a model, from bottom to top."""
    return [plan.stack for plan, _ in distinct_layers(plans) if plan.stack is not None]


def distinct_layers(plans: Iterable[LayerPlan]) -> Iterator[tuple[LayerPlan, int]]:
    """Yield one block of each stack with the number of its blocks, and all other layers with 1."""
    for stack, group in itertools.groupby(plans, lambda plan: plan.stack):
        layers = list(group)
        if stack is None:
            yield from ((plan, 1) for plan in layers)
        else:
            yield layers[0], len(layers)


def alike_layers(plans: Iterable[LayerPlan]) -> Iterator[tuple[LayerPlan, int]]:
    """Yield one layer of each kind and the number of such layers; unequal blocks are separate."""
    kinds: dict[tuple[Any, ...], list[LayerPlan]] = {}
    for plan in plans:
        kind = (plan.name,) if plan.stack is None else (plan.stack, plan.variant)
        kinds.setdefault(kind, []).append(plan)
    yield from ((layers[0], len(layers)) for layers in kinds.values())


@dataclass(frozen=True)
class StackSize:
    """Sizes of a stack of blocks, for tables.

    Attributes:
        flops: FLOPs of a training step for one image, including the head or bridge above.
    """

    name: str
    num_layers: int
    hidden_size: int
    num_heads: int
    num_tokens: int
    flops: float
    phase: Phase

    @classmethod
    def of(cls, stack: PlannedStack, phase: Phase, inside: str = "") -> StackSize:
        """Return the sizes of a stack; `inside` is the name of its enclosing layer and a dot."""
        model = stack.core.model
        return cls(
            name=f"{inside}{stack.core.stack.name}",
            num_layers=model.num_layers,
            hidden_size=model.hidden_size,
            num_heads=model.num_attention_heads,
            num_tokens=stack.work.num_tokens,
            # A backward pass counts as two forward passes, as in `flops.py`.
            flops=3 * stack.flops,
            phase=phase,
        )


def stack_sizes(plans: Iterable[LayerPlan]) -> list[StackSize]:
    """Return all stacks of a model from bottom to top, including those inside other layers."""
    found = []
    for plan, _ in distinct_layers(plans):
        if plan.stack is not None:
            found.append(StackSize.of(plan.stack, plan.phase))
        if plan.inner is not None:
            found.append(StackSize.of(plan.inner, plan.phase, inside=f"{plan.name}."))
    return found


def model_flops(plans: Sequence[LayerPlan]) -> float:
    """Return the FLOPs of one image's forward and backward pass."""
    stacks = sum(stack.flops for stack in stacks_of(plans))
    return 3 * (stacks + sum(plan.own_flops for plan in plans))


def matrix_share(plans: Sequence[LayerPlan]) -> float:
    """Return the fraction of `model_flops` in products of the blocks that may be in FP8."""
    inside = (plan.inner for plan in plans if plan.inner is not None)
    stacks = (*stacks_of(plans), *inside)
    matrices = sum(fp8_flops(stack.core.model, stack.work) for stack in stacks)
    return 3 * matrices / model_flops(plans)


def block_weights(plans: Sequence[LayerPlan]) -> tuple[list[int], list[float]]:
    """Return the index of each block in a list of layers, and its cost for balancing a pipeline.

    The cost of a block is the average of its stack, in units of a block of the first stack. Other
    layers belong to the preceding block, and the first layer to the following one. Their cost is
    counted only if no stack's workload includes it: that of a decoder is, that of an embedding not.
    """
    places = [i for i, plan in enumerate(plans) if plan.stack is not None]
    costs = [_block_flops(stack) for i in places if (stack := plans[i].stack) is not None]
    starts = [0, *places[1:], len(plans)]
    others = (
        sum(plan.own_flops for plan in plans[start:end])
        for start, end in itertools.pairwise(starts)
    )
    weights = [(cost + other) / costs[0] for cost, other in zip(costs, others, strict=True)]
    return places, weights


def _block_flops(stack: PlannedStack) -> float:
    model, work = stack.core.model, stack.work
    head = 2 * work.num_read * model.hidden_size * work.num_outputs
    return (stack.flops - head) / model.num_layers
