"""The words of a paper, and the first layer that follows from them.

A paper names its words: what it reads and predicts (tokens), what is known when (schedule), how a
token asks to be predicted, how it is predicted (density), and what else is known (condition); and
the parts of its first layer. What else follows from them is in `composition.py`.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from functools import cached_property, partial

from torch import nn

from megavis.composition.asking import TRANSFORMED, Asking
from megavis.composition.codebook import TokenIds
from megavis.composition.condition import Condition
from megavis.composition.objective import Objective
from megavis.composition.reader import Reader, Role, Slot
from megavis.composition.tokens import Colors, Patches, Tokens
from megavis.model.core import MEMORY
from megavis.model.embeddings import grid_positions
from megavis.model.init import Initialization, filled, normal, vision_transformer
from megavis.model.positions import carried_names
from megavis.model.visibility import VisibilityKind


class Words(Objective):
    """The words of a paper, which its class defines."""

    @property
    def has_transform(self) -> bool:
        """True where the first layer holds a learned, invertible transform of the tokens."""
        return False

    @property
    @abstractmethod
    def reads(self) -> Tokens:
        """What goes in."""

    @property
    def predicts(self) -> Tokens:
        """What comes out: what is read, unless a paper says otherwise."""
        return self.reads

    @property
    @abstractmethod
    def asks(self) -> Asking:
        """How a token asks to be predicted."""

    @cached_property
    def condition(self) -> Condition:
        """What else is known: nothing, unless a paper says otherwise."""
        return Condition()

    @property
    def part_names(self) -> Mapping[Role, str]:
        """Names of the first layer's parts, which are their parameters', in the order of building.

        Parts that nothing asks for are left out.
        """
        return {}

    @property
    def deviations(self) -> Mapping[Role, float]:
        """Deviation of learned positions and vectors at the start, where it is not 0.02."""
        return {}

    def initialization(self) -> Initialization:
        """Return how the matrices of a block start: those of MAE's released code by default."""
        return vision_transformer()

    def patches(self) -> Patches:
        """Return patches of `objective.patch_size`² pixels."""
        return Patches(image_size=self.config.data.image_size, patch_size=self.paper.patch_size)

    def ids(self) -> TokenIds:
        """Return ids of `objective.tokenizer`, each of which represents such a patch."""
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
        """Names of what the density's head reads besides hidden states."""
        return ()

    # The first layer, which follows.

    @property
    def visibility_kind(self) -> VisibilityKind:
        """That of the asking kind."""
        return self.asks.visibility

    @property
    def carried_names(self) -> tuple[str, ...]:
        """Who sees whom, transformed tokens, coordinates, what the head reads, a memory."""
        return (
            *self.asks.extra_tensors,
            *((TRANSFORMED,) if self.has_transform else ()),
            *carried_names(self.position_kind),
            *self.extra_tensors,
            *((MEMORY,) if "memory" in self.condition.roles else ()),
        )

    @property
    def carries_gradient(self) -> bool:
        """A transform learns from the loss on its tokens, an encoder from what reads its memory."""
        return self.has_transform or "memory" in self.condition.roles

    def slots(self) -> dict[str, Slot]:
        """Return the parts of the first layer, by the names of their parameters."""
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
