"""The model as a list of layers, for every engine.

With one pipeline stage the list is an ordinary module; with several, DeepSpeed's `PipelineModule`
takes the same list. Each layer is seeded by its name, so its weights do not depend on which process
builds it or on the order of building.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, cast

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from megavis.model.core import Core
from megavis.model.declarations import ParamGroupOptions, add_options
from megavis.model.flops import Workload, forward_flops
from megavis.model.layer_state import PackedState
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


@dataclass(frozen=True, eq=False)
class PlannedStack:
    """A stack of equal blocks.

    Attributes:
        core: core of the stack.
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

    @property
    def own_flops(self) -> float:
        """FLOPs of the forward pass for one image, excluding those of `stack`."""
        return self.flops + (0.0 if self.inner is None else self.inner.flops)

    def build(self) -> nn.Module:
        """Build the layer, with initial weights determined by its name and the seed."""
        with seeded(self.seed, "weights", self.name):
            layer = self.factory()
        add_options(layer.parameters(), self.options)
        return layer


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
        self.layers = nn.ModuleList()
        for plan in plans:
            self.layers.append(plan.build())
            built(self.layers[-1])
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
            kept = module.state_dict(keep_vars=True)
            for name, buffer in module.named_buffers():
                if name in kept:
                    yield f"{plan.name}.{name}", buffer
