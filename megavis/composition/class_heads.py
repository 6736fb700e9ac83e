"""Class logits on top of any paper's model: the classifier, and how it joins the paper's layers.

Legend: b images, s tokens, h hidden size, c classes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.distributed import ProcessGroup

from megavis.config.schema import FinetuneConfig
from megavis.model.batch_norm import BatchNorm
from megavis.model.core import Core
from megavis.model.declarations import set_start
from megavis.model.heads import Head
from megavis.model.init import Fill, normal, zeros
from megavis.model.layer_state import LayerState, PackedState
from megavis.model.norms import Norm
from megavis.model.patches import WholeLinear
from megavis.model.sequence_parallel import all_tokens


class Classifier(nn.Module):
    """Class logits from what the last norm gives.

    Every process of the tensor group computes all of them: c is small, and no size has to divide.
    """

    def __init__(self, core: Core, settings: FinetuneConfig, processes: ProcessGroup) -> None:
        """Build.

        Args:
            core: sizes and groups.
            settings: the config's `finetune` section.
            processes: of the data-parallel group, over which linear evaluation standardises.
        """
        super().__init__()
        self.core, self.read_out = core, settings.read_out
        width = core.megatron.hidden_size
        self.standardize: nn.Module | None = None
        fill: Fill = zeros
        if settings.linear_evaluation:
            self.standardize, fill = BatchNorm(width, processes), normal(0.01)
        self.linear = WholeLinear(width, settings.num_classes, fill)
        # No run that fine-tuning starts from has them for these classes.
        set_start(self.parameters(), "fresh")

    def forward(self, normalised: Tensor) -> Tensor:
        """Map this process's tokens `[s, b, h]` to float32 logits `[b, c]`."""
        tokens = all_tokens(normalised, self.core.megatron, self.core.groups.tp)
        if self.read_out == "mean":
            described = tokens.float().mean(0)
        else:
            described = tokens[0 if self.read_out == "first" else -1]
        if self.standardize is not None:
            described = self.standardize(described)
        return self.linear(described).float()


class ClassHead(Head):
    """The last norm and the classifier, without the paper's own predictions."""

    def __init__(self, core: Core, norm: Norm, classifier: Classifier) -> None:
        super().__init__(core, norm)
        self.classifier = classifier

    def forward(self, state: PackedState) -> Tensor:
        """Map the `PackedState` of `[s, b, h]` to logits `[b, c]`."""
        hidden = LayerState.unpack(state, self.core.carried_names).hidden
        return self.classifier(self.norm(hidden))


def add_classifier(head: Head, classifier: Classifier) -> Head:
    """Let a paper's head give class logits after its own predictions.

    By hooks and not by a module around it, so that its parameters keep the names under which the
    run that fine-tuning starts from has saved them.

    Args:
        head: any paper's last layer.
        classifier: becomes part of it.
    """
    normalised: list[Tensor] = []

    def keep(_: nn.Module, __: Any, output: Tensor) -> None:
        normalised.append(output)

    def join(_: nn.Module, __: Any, predictions: Any) -> tuple[Tensor, ...]:
        own = (predictions,) if isinstance(predictions, Tensor) else predictions
        return (*own, classifier(normalised.pop()))

    head.norm.register_forward_hook(keep)
    head.register_forward_hook(join)
    head.classifier = classifier
    return head


def frozen(factory: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    """Return what builds the same layer, of which nothing learns."""
    return lambda: factory().requires_grad_(False)
