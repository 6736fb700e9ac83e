"""Classifier heads for any paper's model, and how they attach to its layers.

Legend: b images, s tokens, h hidden size, c classes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from megavis.config.schema import FinetuneConfig
from megavis.model.context_parallel import all_tokens
from megavis.model.core import Core
from megavis.model.declarations import set_start
from megavis.model.embeddings import ReplicatedLinear
from megavis.model.heads import Head
from megavis.model.init import Fill, normal, zeros
from megavis.model.layer_state import LayerState, PackedState
from megavis.model.norms import BatchNorm, Norm
from megavis.model.stack import FeatureLayer, watch_features


class Classifier(nn.Module):
    """Class logits from the features of one layer, or of several concatenated layers.

    Replicated on every process of the tensor group: c is small and need not divide.

    Attributes:
        below: features `[s, b, h]` of the layers below the one that the classifier is attached to.
            Their forward passes append to it; the classifier clears it.
    """

    def __init__(
        self,
        core: Core,
        settings: FinetuneConfig,
        processes: ProcessGroup,
        below: list[Tensor],
    ) -> None:
        """Build.

        Args:
            core: sizes and groups.
            settings: the config's `finetune` section.
            processes: the data-parallel group, for the batch norm of linear evaluation.
            below: see the class.
        """
        super().__init__()
        self.core, self.read_out = core, settings.read_out
        self.below = below
        width = core.megatron.hidden_size * settings.concatenate
        self.standardize: nn.Module | None = None
        deviation = 0.0
        if settings.linear_evaluation:
            deviation = 0.01
            self.standardize = BatchNorm(width, processes) if settings.standardize else None
        if settings.classifier_std is not None:
            deviation = settings.classifier_std
        fill: Fill = normal(deviation) if deviation else zeros
        self.linear = ReplicatedLinear(width, settings.num_classes, fill)
        # The pretrained run has no classifier for these classes.
        set_start(self.parameters(), "fresh")

    def pooled(self, features: Tensor) -> Tensor:
        """Pool this process's tokens `[s, b, h]`, or select one of them: `[b, h]`."""
        tokens = all_tokens(features, self.core.megatron, self.core.groups)
        if self.read_out == "mean":
            return tokens.float().mean(0)
        return tokens[0 if self.read_out == "first" else -1]

    def forward(self, features: Tensor) -> Tensor:
        """Map this process's tokens `[s, b, h]` to float32 logits `[b, c]`."""
        layers = [self.pooled(each) for each in (*self.below, features)]
        self.below.clear()
        pooled = torch.cat(layers, dim=1)
        if self.standardize is not None:
            pooled = self.standardize(pooled)
        return self.linear(pooled).float()


class ClassHead(Head):
    """The norm of a feature layer, without the rest of the layer, and the classifier."""

    def __init__(self, core: Core, layer: nn.Module, classifier: Classifier) -> None:
        norm = cast(FeatureLayer, layer).feature_norm
        assert isinstance(norm, Norm)
        super().__init__(core, norm, next(n for n, each in layer.named_children() if each is norm))
        self.classifier = classifier

    def forward(self, state: PackedState) -> Tensor:
        """Map the `PackedState` of `[s, b, h]` to logits `[b, c]`."""
        hidden = LayerState.unpack(state, self.core.carried_names).hidden
        # Always call the norm, since hooks may watch it.
        normed = self.feature_norm(hidden)
        return self.classifier(hidden if self.core.model.features == "blocks" else normed)


def add_classifier(head: Head, classifier: Classifier) -> Head:
    """Make a paper's head return class logits after its own predictions.

    Uses hooks rather than a wrapper module, so that parameters keep the names under which the
    pretrained run saved them.

    Args:
        head: any paper's last layer.
        classifier: added to the head as a submodule.
    """
    features: list[Tensor] = []

    def join(_: nn.Module, __: Any, predictions: Any) -> tuple[Tensor, ...]:
        own = (predictions,) if isinstance(predictions, Tensor) else predictions
        return (*own, classifier(features.pop()))

    watch_features(head, features.append)
    head.register_forward_hook(join)
    head.classifier = classifier
    return head


def watched(
    factory: Callable[[], nn.Module], keep: Callable[[Tensor], None]
) -> Callable[[], nn.Module]:
    """Return a factory of the same layer that passes its features `[s, b, h]` to `keep`."""

    def build() -> nn.Module:
        layer = factory()
        watch_features(layer, keep)
        return layer

    return build


def frozen(factory: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    """Return a factory of the same layer with frozen parameters."""
    return lambda: factory().requires_grad_(False)
