"""The model as one list of layers, which every engine runs.

With one pipeline stage the list is an ordinary module; with several, DeepSpeed's `PipelineModule`
takes the same list. A layer is seeded by its place, so its weights do not depend on which process
builds it or on what was built before.
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
"""What a head gives: a tensor, or several."""

Loss = Callable[[Any, tuple[Tensor, ...]], Tensor]
"""From what the last layer gives and the targets to a scalar."""


class FeatureLayer(Protocol):
    """A layer off which features may be read."""

    @property
    def core(self) -> Core:
        """What the layer is built from; its config says what features are."""

    @property
    def feature_norm(self) -> nn.Module:
        """The norm that is called once a forward pass, on the stream of hidden states."""


def watch_features(layer: nn.Module, keep: Callable[[Tensor], None]) -> RemovableHandle:
    """Call `keep` with the features `[s, b, h]` of a `FeatureLayer` in every forward pass."""
    watched = cast(FeatureLayer, layer)

    def hook(_: nn.Module, entering: tuple[Tensor, ...], output: Tensor) -> None:
        keep(entering[0] if watched.core.model.features == "blocks" else output)

    return watched.feature_norm.register_forward_hook(hook)


Phase = Literal["once", "step"]
"""When a layer runs as images are generated: once for each image, or in every step."""


@dataclass(frozen=True, eq=False)
class PlannedStack:
    """A stack of equal blocks.

    Attributes:
        core: from which its blocks are built.
        work: what its blocks compute for an image, and the map above them.
        num_passing: numbers of an image that travel past its blocks, with a gradient, to those of
            the stack above.
    """

    core: Core
    work: Workload
    num_passing: int = 0

    @property
    def flops(self) -> float:
        """Operations of the forward pass for one image."""
        return forward_flops(self.core.model, self.work)


@dataclass(frozen=True)
class LayerPlan:
    """A layer that is not built yet."""

    name: str
    """Its part of every parameter's name, for example `blocks.3`."""
    factory: Callable[[], nn.Module]
    seed: int
    """Of the run."""
    depth: int = 0
    """Place among the layers that the gradient passes, from 0; layer-wise decay counts it."""
    options: ParamGroupOptions = ParamGroupOptions()
    """How the optimizer treats the layer's parameters; they may declare more of their own."""
    stack: PlannedStack | None = None
    """Of a block; None for any other layer."""
    inner: PlannedStack | None = None
    """A stack inside this layer, which no pipeline cuts: a decoder in the last layer."""
    flops: float = 0.0
    """Operations of the forward pass for one image that no stack's workload counts."""
    gives_features: bool = False
    """Features are read off this layer's norm; see `FeatureLayer`."""
    phase: Phase = "step"

    @property
    def own_flops(self) -> float:
        """Operations of the forward pass for one image besides those of `stack`."""
        return self.flops + (0.0 if self.inner is None else self.inner.flops)

    def build(self) -> nn.Module:
        """Build the layer with the weights that its name and the seed decide."""
        with seeded(self.seed, "weights", self.name):
            layer = self.factory()
        add_options(layer.parameters(), self.options)
        return layer


def num_up_to_features(plans: Sequence[LayerPlan]) -> int:
    """Return how many layers there are up to the last off which features are read."""
    return max((i for i, plan in enumerate(plans, 1) if plan.gives_features), default=0)


class LayerStack(nn.Module):
    """All layers in one process, and the loss on top."""

    def __init__(
        self,
        plans: Sequence[LayerPlan],
        loss: Loss,
        *,
        built: Callable[[nn.Module], object] = lambda layer: None,
    ) -> None:
        """Build the layers; `built` is called with each before the next one is built."""
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
    """The layers that this process holds, with their names: one view for every engine."""

    plans: Sequence[LayerPlan]
    modules: Sequence[nn.Module]

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield parameters under the names that they have in every layout."""
        for plan, module in zip(self.plans, self.modules, strict=True):
            for name, parameter in module.named_parameters():
                yield f"{plan.name}.{name}", parameter

    def of_phase(self, phase: Phase) -> list[nn.Module]:
        """Return the layers of a phase, from below."""
        pairs = zip(self.plans, self.modules, strict=True)
        return [module for plan, module in pairs if plan.phase == phase]

    def feature_layers(self) -> list[nn.Module]:
        """Return the layers off which features are read (`FeatureLayer`), from below."""
        pairs = zip(self.plans, self.modules, strict=True)
        return [module for plan, module in pairs if plan.gives_features]

    def up_to_features(self) -> Sequence[nn.Module]:
        """Return the layers up to the last off which features are read; none above all of these."""
        return self.modules[: num_up_to_features(self.plans)]

    def named_buffers(self) -> Iterator[tuple[str, Tensor]]:
        """Yield what training keeps besides parameters, likewise."""
        for plan, module in zip(self.plans, self.modules, strict=True):
            kept = module.state_dict(keep_vars=True)
            for name, buffer in module.named_buffers():
                if name in kept:
                    yield f"{plan.name}.{name}", buffer
