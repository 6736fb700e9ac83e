"""Pictures of GVP: hidden patches predicted group by group (appendix F, Figure 2).

Legend: b images, T patches of an image, d numbers of a patch.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

import torch
from torch import Tensor

from megavis.config.errors import UserError
from megavis.objectives import gvp_segmentation as segmentation
from megavis.objectives.base import Objective
from megavis.objectives.gvp_config import GVPConfig
from megavis.objectives.gvp_layers import TwoStreams, two_streams
from megavis.objectives.image_tokens import Tokens
from megavis.tokenizers.patches import to_uint8, unpatchify


class FillsPatches(Objective):
    """What `megavis.sampling.groupwise.GroupByGroup` asks for, of models of pixels."""

    @property
    def paper(self) -> GVPConfig:
        """The paper's section of the config."""
        assert isinstance(self.config.objective, GVPConfig)
        return self.config.objective

    @property
    @abstractmethod
    def content(self) -> Tokens:
        """What the model reads."""

    def check_filling(self) -> None:
        """Want pixels as they are, asked for by a query.

        Raises:
            UserError: ids are predicted; or each patch standardised by itself, so that what it was
                is not known; or what is hidden is told; or no patch can be asked for.
        """
        paper = self.paper
        if paper.variant != "p2p":
            raise UserError(f"pictures are drawn of objective.variant p2p, not {paper.variant}")
        faults = {
            "normalize_targets does not know how bright its patches are": paper.normalize_targets,
            "condition_size is told about the whole image": paper.condition_size is not None,
            "streams one does not know which patch is asked for": paper.streams == "one",
        }
        for fault in [text for text, holds in faults.items() if holds]:
            raise UserError(f"a model with objective.{fault}; pictures need one trained without")

    def patches_of(self, images: Any) -> Tensor:
        """Return standardised patches float32 `[b, T, d]` of images uint8 `[b, h, w, 3]`.

        Raises:
            UserError: they have another size or type.
        """
        return self.content.of(images)

    def images_of(self, patches: Tensor) -> Tensor:
        """Undo `patches_of`: `[b, T, d]` to the nearest uint8 `[b, h, w, 3]`."""
        return to_uint8(unpatchify(patches, self.paper.patch_size))

    def inputs_of_group(
        self, patches: Tensor, order: Tensor, boundaries: tuple[int, ...]
    ) -> TwoStreams:
        """Return both streams, with queries for the last group alone."""
        *_, first, last = boundaries
        ends = torch.tensor(boundaries[:-1], device=order.device).expand(len(order), -1)
        groups = segmentation.groups_of(ends, self.num_tokens)
        asked = slice(first, last)
        return two_streams(
            patches, order[:, :first], groups[:, :first], order[:, asked], groups[:, asked]
        )
