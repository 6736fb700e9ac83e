"""Class logits on top of any paper's model: the classifier, and how it joins the paper's layers.

Legend: b images, s tokens, h hidden size, c classes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from megavis.config.schema import FinetuneConfig
from megavis.model.core import Core
from megavis.model.declarations import set_start
from megavis.model.embeddings import WholeLinear
from megavis.model.heads import Head
from megavis.model.init import Fill, normal, zeros
from megavis.model.layer_state import LayerState, PackedState
from megavis.model.norms import BatchNorm, Norm
from megavis.model.stack import FeatureLayer, watch_features
from megavis.model.tensor_parallel import all_tokens


class Classifier(nn.Module):
    """Class logits from the features of a layer, or of several side by side.

    Every process of the tensor group computes all of them: c is small, and no size has to divide.

    Attributes:
        below: features `[s, b, h]` of the layers below the one that it stands on. A forward pass of
            these has put them there, and the classifier takes them out again.
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
            processes: of the data-parallel group, over which linear evaluation standardises.
            below: see `below`.
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
        self.linear = WholeLinear(width, settings.num_classes, fill)
        # No run that fine-tuning starts from has them for these classes.
        set_start(self.parameters(), "fresh")

    def described(self, features: Tensor) -> Tensor:
        """Return `[b, h]` of this process's tokens `[s, b, h]`."""
        tokens = all_tokens(features, self.core.megatron, self.core.groups.tp)
        if self.read_out == "mean":
            return tokens.float().mean(0)
        return tokens[0 if self.read_out == "first" else -1]

    def forward(self, features: Tensor) -> Tensor:
        """Map this process's tokens `[s, b, h]` to float32 logits `[b, c]`."""
        layers = [self.described(each) for each in (*self.below, features)]
        self.below.clear()
        described = torch.cat(layers, dim=1)
        if self.standardize is not None:
            described = self.standardize(described)
        return self.linear(described).float()


class ClassHead(Head):
    """The norm of a layer off which features are read, and the classifier; nothing else of it."""

    def __init__(self, core: Core, layer: nn.Module, classifier: Classifier) -> None:
        norm = cast(FeatureLayer, layer).feature_norm
        assert isinstance(norm, Norm)
        super().__init__(core, norm, next(n for n, each in layer.named_children() if each is norm))
        self.classifier = classifier

    def forward(self, state: PackedState) -> Tensor:
        """Map the `PackedState` of `[s, b, h]` to logits `[b, c]`."""
        hidden = LayerState.unpack(state, self.core.carried_names).hidden
        # Called in any case, for those who watch it.
        normed = self.feature_norm(hidden)
        return self.classifier(hidden if self.core.model.features == "blocks" else normed)


def add_classifier(head: Head, classifier: Classifier) -> Head:
    """Let a paper's head give class logits after its own predictions.

    By hooks and not by a module around it, so that its parameters keep the names under which the
    run that fine-tuning starts from has saved them.

    Args:
        head: any paper's last layer.
        classifier: becomes part of it.
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
    """Return what builds the same layer, whose features `[s, b, h]` are kept as well."""

    def build() -> nn.Module:
        layer = factory()
        watch_features(layer, keep)
        return layer

    return build


def frozen(factory: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    """Return what builds the same layer, of which nothing learns."""
    return lambda: factory().requires_grad_(False)
