"""The choices that define a paper, and the first layer derived from them.

A paper chooses the tokens that it reads and predicts, a schedule (what is known when), an asking
kind (which row predicts a token), a density (how a token is predicted), a condition (what else is
known), and the parts of its first layer. Everything else is derived in `composition.py`.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from functools import cached_property, partial

from torch import nn

from megavis.composition.asking import TRANSFORMED, Asking
from megavis.composition.condition import Condition
from megavis.composition.encoded_tokens import TokenIds
from megavis.composition.objective import Objective
from megavis.composition.reader import Reader, Role, Slot
from megavis.composition.tokens import Colors, Patches, Tokens
from megavis.model.core import MEMORY
from megavis.model.embeddings import grid_positions
from megavis.model.init import Initialization, filled, normal, vision_transformer
from megavis.model.positions import carried_names
from megavis.model.visibility import VisibilityKind


class Words(Objective):
    """The choices of a paper, defined by its class."""

    @property
    def has_transform(self) -> bool:
        """True if the first layer contains a learned, invertible transform of the tokens."""
        return False

    @property
    @abstractmethod
    def reads(self) -> Tokens:
        """The input tokens."""

    @property
    def predicts(self) -> Tokens:
        """The predicted tokens, by default the input tokens."""
        return self.reads

    @property
    @abstractmethod
    def asks(self) -> Asking:
        """Which row predicts a token."""

    @cached_property
    def condition(self) -> Condition:
        """What the model is conditioned on, by default nothing."""
        return Condition()

    @property
    def part_names(self) -> Mapping[Role, str]:
        """Names of the first layer's parts, which begin their parameters', in building order.

        Parts that are not needed are not built.
        """
        return {}

    @property
    def deviations(self) -> Mapping[Role, float]:
        """Initial standard deviation of learned positions and vectors, where it is not 0.02."""
        return {}

    def initialization(self) -> Initialization:
        """Return the initialization of a block's matrices, by default that of MAE's code."""
        return vision_transformer()

    def patches(self) -> Patches:
        """Return patches of `objective.patch_size`² pixels."""
        return Patches(image_size=self.config.data.image_size, patch_size=self.paper.patch_size)

    def ids(self) -> TokenIds:
        """Return ids of `objective.tokenizer`, one per patch of that size."""
        paper, size = self.paper, self.config.data.image_size
        return TokenIds(
            image_size=size,
            side=size // paper.patch_size,
            vocabulary_size=paper.vocabulary_size,
            tokenizer=paper.tokenizer,
        )

    def colours(self) -> Colors:
        """Return ids of a palette of `objective.vocabulary_size` colours."""
        data, count = self.config.data, self.paper.vocabulary_size
        windows = data.crop == "window"
        return Colors(image_size=data.image_size, vocabulary_size=count, windows=windows)

    @property
    def extra_tensors(self) -> tuple[str, ...]:
        """Names of the density's head inputs besides hidden states."""
        return ()

    # The first layer, derived from the choices above.

    @property
    def visibility_kind(self) -> VisibilityKind:
        """Visibility of the asking kind."""
        return self.asks.visibility

    @property
    def carried_names(self) -> tuple[str, ...]:
        """Names for visibility, transformed tokens, coordinates, head inputs and memory."""
        return (
            *self.asks.extra_tensors,
            *((TRANSFORMED,) if self.has_transform else ()),
            *carried_names(self.position_kind),
            *self.extra_tensors,
            *((MEMORY,) if "memory" in self.condition.roles else ()),
        )

    @property
    def carries_gradient(self) -> bool:
        """True with a transform, trained by the loss on its tokens, or an encoder's memory."""
        return self.has_transform or "memory" in self.condition.roles

    def slots(self) -> dict[str, Slot]:
        """Return the parts of the first layer by name."""
        needed = {*self.asks.roles, *self.condition.roles}
        needed |= {"transform"} if self.has_transform else set()
        names = {role: name for role, name in self.part_names.items() if role in needed}
        return {name: Slot(role, partial(self.part, role)) for role, name in names.items()}

    def part(self, role: Role) -> nn.Module | nn.Parameter:
        """Build a part of the first layer."""
        conditional = self.condition.part(role, self.core)
        if conditional is not None:
            return conditional
        fill = normal(self.deviations.get(role, 0.02))
        if role == "content":
            return self.reads.embedding(self.core)
        if role in ("positions", "asked_positions"):
            return grid_positions(self.core, self.position_kind, self.reads.grid, fill=fill)
        assert role in ("start", "query", "mask", "front"), f"the paper builds its {role}"
        return filled(self.core.model.hidden_size, fill=fill)

    def build_embedding(self) -> nn.Module:
        """Return the first layer."""
        return Reader(
            self.core,
            self.asks,
            self.slots(),
            conditions=self.condition.roles,
            extras=self.extra_tensors,
        )
