"""MP3: Position Prediction as an Effective Pretraining Strategy (Zhai et al., 2022).

An image is a set of patches without positions. All patches are queries, and a random share 1 - η of
them, the context, provides keys and values (section 3.2). A linear head predicts the position of
every patch, inside and outside the context (algorithm 1).

Algorithm 1 keeps η of the patches as context; the text keeps 1 - η, which is followed here. The
class token comes first (section 3.1 and appendix A); the paper does not say whether patches attend
to it, here they do at every η.

For speech, the frames of a spectrogram are the patches, and the positions of a few of them are
given (section 4.3). The paper does not say whether these count in the loss; here they do not.

Legend: n patches.
"""

from __future__ import annotations

from functools import cached_property

from megavis.composition.asking import InContext
from megavis.composition.composition import Composition
from megavis.composition.tokens import Frames, Patches
from megavis.densities.categorical import Place
from megavis.model.embeddings import TokenHead
from megavis.model.parameters import Initialization, normal
from megavis.papers.mp3.config import MP3Config
from megavis.schedules.masked import RandomMasking


class MP3(Composition):
    """Predict the position of every patch of an image."""

    config_type = MP3Config
    paper: MP3Config

    @property
    def relative_grid(self) -> tuple[int, int] | None:
        """The grid of the patches, if attention has a relative bias."""
        return self.reads.grid if self.position_kind == "relative_2d" else None

    @cached_property
    def reads(self) -> Frames | Patches:
        """Patches, or frames of a spectrogram (section 4.3)."""
        data = self.config.data
        if data.frames is None:
            return self.patches()
        return Frames(*data.frames, normalize=data.normalize_frames)

    @cached_property
    def schedule(self) -> RandomMasking:
        """A random share 1 - η of the patches is the context."""
        return RandomMasking(
            self.num_tokens,
            mask_ratio=self.paper.mask_ratio,
            placed_ratio=self.paper.given_ratio,
            seed=self.config.seed,
        )

    @cached_property
    def asks(self) -> InContext:
        """Each patch's row predicts its own position from the context and the class token."""
        return InContext(num_front=int(self.paper.class_token))

    @cached_property
    def density(self) -> Place:
        """Logits over the positions."""
        return Place(
            self.num_tokens,
            num_skipped=int(self.paper.class_token),
            build_head=lambda: TokenHead(self.core, self.num_tokens, normal(0.02)),
        )

    def initialization(self) -> Initialization:
        """Return the same normal distribution for all matrices, as in DeiT (section 4.2)."""
        fill = normal(self.paper.initial_deviation)
        return Initialization(fill, fill, fill, fill, fill)
