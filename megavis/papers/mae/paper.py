"""MAE: Masked Autoencoders Are Scalable Vision Learners (He et al., 2021).

An encoder sees a random quarter of the patches. A narrower decoder takes its output and mask tokens
at the positions of the other patches, and predicts their pixels (section 3). Tokens need not be
unshuffled: they have position embeddings, and full attention is permutation-equivariant.
"""

from __future__ import annotations

from functools import cached_property

from torch import nn

from megavis.composition.asking import Visible
from megavis.composition.composition import Composition
from megavis.composition.parts import Role
from megavis.composition.reader import SecondStack
from megavis.composition.tokens import Patches
from megavis.densities.squared_error import SquaredError
from megavis.model.embeddings import TokenHead
from megavis.model.parameters import with_decay
from megavis.papers.mae.config import MAEConfig
from megavis.schedules.masked import RandomMasking


class MAE(Composition):
    """Predict the hidden patches from the visible ones."""

    config_type = MAEConfig
    paper: MAEConfig
    default_positions = "sincos"

    @cached_property
    def reads(self) -> Patches:
        """Patches of pixels."""
        return self.patches()

    @cached_property
    def schedule(self) -> RandomMasking:
        """A random share of the patches is visible; the others are predicted."""
        return RandomMasking(
            self.reads.num_tokens,
            mask_ratio=self.paper.mask_ratio,
            asks_context=False,
            seed=self.config.seed,
        )

    @cached_property
    def asks(self) -> Visible:
        """The encoder holds the class token and the visible patches; the decoder adds the rest."""
        return Visible(num_front=int(self.paper.class_token))

    @cached_property
    def second_stack(self) -> SecondStack:
        """The decoder (section 3)."""
        return SecondStack(
            self.core,
            self.asks,
            self.paper.decoder.model_dump(),
            grid=self.reads.grid,
            positions=self.position_kind,
            tokens_decay=self.paper.tokens_decay,
        )

    def part(self, role: Role) -> nn.Module | nn.Parameter:
        """Build a part; the class token decays in pre-training, if `tokens_decay` says so."""
        built = super().part(role)
        if role == "front" and self.paper.tokens_decay and self.config.finetune is None:
            assert isinstance(built, nn.Parameter)
            with_decay(built)
        return built

    @cached_property
    def density(self) -> SquaredError:
        """Squared error of the hidden patches' pixels."""
        visible = self.schedule.num_context(self.paper.mask_ratio)
        width, skipped = self.reads.width, self.asks.num_front + visible
        return SquaredError(
            width,
            normalize=self.paper.normalize_targets,
            build_head=lambda: TokenHead(self.second_stack.core, width, num_skipped=skipped),
        )
