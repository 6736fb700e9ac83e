"""Stacks of blocks as parts of a model's list of layers, and the bridges between them.

A model is a list of layer plans: the first layer, the blocks of one stack or of several, bridges
between them, the head. Stacks may differ in width, heads, visibility and number of tokens; counts
of operations, plans and the cuts of a pipeline follow from the list.

Legend: b images, s tokens, h hidden size of the stack below, w that of the stack above.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from torch import Tensor, nn

from megavis.model.core import Block, Core
from megavis.model.embeddings import LastNorm, WholeLinear, to_stream
from megavis.model.flops import Workload
from megavis.model.init import Fill, xavier_uniform
from megavis.model.layer_state import LayerState, PackedState
from megavis.model.stack import LayerPlan, Phase, PlannedStack


class Bridge(nn.Module):
    """Between two stacks: the norm above the lower one, and a linear map to the upper one's width.

    It sees all tokens on every process of the tensor group, and splits what it gives again where
    the upper stack has sequence parallelism; both stacks have it alike.
    """

    def __init__(self, below: Core, above: Core, fill: Fill = xavier_uniform) -> None:
        super().__init__()
        self.below, self.above = below, above
        self.norm = LastNorm(below)
        self.linear = WholeLinear(below.model.hidden_size, above.model.hidden_size, fill)

    @property
    def core(self) -> Core:
        """The lower stack's."""
        return self.below

    @property
    def feature_norm(self) -> LastNorm:
        """The norm above the lower stack."""
        return self.norm

    def forward(self, state: PackedState) -> PackedState:
        """Map `[s, b, h]` to `[s', b, w]`, with what the upper stack carries."""
        stream = LayerState.unpack(state, self.below.carried_names)
        hidden = self.linear(self.norm.whole(stream.hidden))
        hidden, carried = self.enter(hidden, stream.carried)
        named = {name: carried[name] for name in self.above.carried_names}
        return LayerState(to_stream(hidden, self.above), named).pack()

    def enter(
        self, hidden: Tensor, carried: Mapping[str, Tensor]
    ) -> tuple[Tensor, Mapping[str, Tensor]]:
        """Return the tokens that enter the upper stack, and what is carried with them.

        A paper adds fillers and positions here.

        Args:
            hidden: `[b, s, w]`, whole on every process.
            carried: what the lower stack carried.
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
        core: of the stack.
        work: tokens of an image in this stack; `num_outputs` is what the head, or the bridge, above
            it gives for each that it reads.
        seed: of the run.
        depth: of the first block; see `LayerPlan`.
        deepens: each block is one deeper than that below it; else all are alike.
        gives_features: see `LayerPlan`.
        phase: likewise.
        num_passing: see `PlannedStack`.
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


def bridge_plan(
    name: str, build: Callable[[], Bridge], *, seed: int, depth: int, flops: float = 0.0
) -> LayerPlan:
    """Return a bridge as a layer, off whose norm features are read.

    Its matrix is counted with the stack below, `flops` what else it computes for an image.
    """
    return LayerPlan(name, build, seed, depth, flops=flops, gives_features=True)


def stacks_of(plans: Iterable[LayerPlan]) -> list[PlannedStack]:
    """Return the stacks of a model, from below."""
    return [plan.stack for plan, _ in distinct_layers(plans) if plan.stack is not None]


def distinct_layers(plans: Iterable[LayerPlan]) -> Iterator[tuple[LayerPlan, int]]:
    """Yield one block of each stack with their number, and every other layer once."""
    for stack, group in itertools.groupby(plans, lambda plan: plan.stack):
        layers = list(group)
        if stack is None:
            yield from ((plan, 1) for plan in layers)
        else:
            yield layers[0], len(layers)


@dataclass(frozen=True)
class StackSize:
    """A stack of blocks as tables show it.

    Attributes:
        name: begins its parameters' names.
        num_layers: blocks.
        hidden_size: width of the residual stream.
        num_heads: attention heads.
        num_tokens: of an image.
        flops: operations of a training step for one image, with the map above it.
        phase: when it runs as images are generated.
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
        """Return the sizes of a stack; `inside`: the layer that holds it, and a dot."""
        model = stack.core.model
        return cls(
            name=f"{inside}{stack.core.stack.name}",
            num_layers=model.num_layers,
            hidden_size=model.hidden_size,
            num_heads=model.num_attention_heads,
            num_tokens=stack.work.num_tokens,
            flops=3 * stack.flops,
            phase=phase,
        )


def stack_sizes(plans: Iterable[LayerPlan]) -> list[StackSize]:
    """Return all stacks of a model, from below, inside layers or not."""
    found = []
    for plan, _ in distinct_layers(plans):
        if plan.stack is not None:
            found.append(StackSize.of(plan.stack, plan.phase))
        if plan.inner is not None:
            found.append(StackSize.of(plan.inner, plan.phase, inside=f"{plan.name}."))
    return found


def model_flops(plans: Sequence[LayerPlan]) -> float:
    """Return the operations of one image's forward and backward pass through these layers."""
    stacks = sum(stack.flops for stack in stacks_of(plans))
    return 3 * (stacks + sum(plan.own_flops for plan in plans))


def block_weights(plans: Sequence[LayerPlan]) -> tuple[list[int], list[float]]:
    """Return the index of each block in a list of layers, and its weight in a pipeline stage.

    A block weighs as much as an average block of its stack, in blocks of the first stack. Other
    layers stay with the block before them, and the first one with the block after it; of these,
    only what no stack's workload counts adds weight: encoders and decoders, not maps of tokens.
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
