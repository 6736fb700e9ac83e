"""MP3: Position Prediction as an Effective Pretraining Strategy (Zhai et al., 2022).

An image is a set of patches: nobody tells the network where they stood. Queries come from all
patches, keys and values from a random share 1 - η of them, the context (section 3.2). A linear head
names the place of every patch, context and masked alike (algorithm 1).

Algorithm 1 keeps η of the patches as context; the text keeps 1 - η, which is followed here. The
class token stands in front (section 3.1 and appendix A); the paper does not say whether others see
it, here they do, at every η.

Of speech, the frames of a spectrogram are the patches, and a few of them are told where they stand
(section 4.3). The paper does not say whether these count in the loss; here they do not.

Legend: b images, n patches, c of them context, g of these told where they stand, d numbers of a
patch, h hidden size.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megavis.data.batch import Batch
from megavis.data.manifest import Manifest
from megavis.densities.place import PLACED, Place
from megavis.model.flops import Workload
from megavis.model.init import Initialization, normal
from megavis.model.patches import TokenHead
from megavis.model.positions import carried_names
from megavis.model.visibility import Kind
from megavis.objectives.base import Objective, Sequence, blank_batch
from megavis.objectives.mp3_config import MP3Config
from megavis.objectives.mp3_layers import Frames, Patches, Pieces, SetEmbedding
from megavis.schedules.base import Arrangement
from megavis.schedules.context import Context


class MP3(Objective):
    """Put the patches of an image back in their places."""

    config_type = MP3Config

    @property
    def paper(self) -> MP3Config:
        """The paper's section of the config."""
        assert isinstance(self.config.objective, MP3Config)
        return self.config.objective

    @property
    def visibility_kind(self) -> Kind:
        """All tokens see the context."""
        return "context"

    @property
    def carries(self) -> tuple[str, ...]:
        """Places of the tokens that are seen, and rows and columns for relative positions."""
        return ("context", *carried_names(self.position_kind))

    @property
    def relative_grid(self) -> tuple[int, int] | None:
        """The grid of the patches, where attention knows offsets."""
        return self.grid if self.position_kind == "relative_2d" else None

    @property
    def pieces(self) -> Pieces:
        """What samples are cut into."""
        data = self.config.data
        if data.frames is not None:
            return Frames(data.frames[1])
        return Patches(data.image_size, self.paper.patch_size)

    @property
    def grid(self) -> tuple[int, int]:
        """Rows and columns of places."""
        return self.paper.grid(self.config)

    @property
    def num_places(self) -> int:
        """Patches n of an image, and places that each may have come from."""
        return self.grid[0] * self.grid[1]

    @property
    def num_placed(self) -> int:
        """Patches g that show where they stand in pre-training, the first of the context."""
        return self.schedule.num_placed

    @property
    def num_tokens(self) -> int:
        """Patches and the class token."""
        return self.num_places + self.paper.class_token

    @cached_property
    def density(self) -> Place:
        """One logit a place."""
        return Place(
            self.num_places, num_skipped=int(self.paper.class_token), build_head=self._build_head
        )

    @cached_property
    def schedule(self) -> Context:
        """A random share 1 - η of the patches is seen."""
        return Context(
            self.num_places,
            mask_ratio=self.paper.mask_ratio,
            placed_ratio=self.paper.given_ratio,
            seed=self.config.seed,
        )

    def workload(self) -> Workload:
        """Count keys and values of the context alone."""
        seen = self.schedule.num_context(self.paper.mask_ratio) + self.paper.class_token
        return Workload(self.num_tokens, seen, float(seen), self.num_tokens, self.num_outputs)

    def check_data(self, manifest: Manifest) -> Iterator[str]:
        """Want photographs, or frames of the config's number and width."""
        wanted, frames = self.pieces.shard_kind, self.config.data.frames
        if manifest.kind != wanted:
            yield f"holds {manifest.kind} shards; {self.paper.name} wants {wanted} shards here"
        elif manifest.frame_shape != frames:
            yield f"holds frames {list(manifest.frame_shape or ())}; data.frames is {frames}"

    def initialization(self) -> Initialization:
        """Return one normal distribution for every matrix, as DeiT (section 4.2)."""
        fill = normal(self.paper.initial_deviation)
        return Initialization(fill, fill, fill, fill, fill)

    def build_embedding(self) -> nn.Module:
        """Return the embedding of patches, of which only some are told where they stand."""
        return SetEmbedding(
            self.core,
            self.pieces.width,
            grid=self.grid,
            positions=self.position_kind,
            class_token=self.paper.class_token,
        )

    def _build_head(self) -> TokenHead:
        return TokenHead(self.core, self.num_places, normal(0.02))

    @property
    def mask_ratio(self) -> float:
        """η in training."""
        return self.paper.mask_ratio

    def patches_of(self, images: Tensor) -> Tensor:
        """Cut samples as shards hold them into standardized patches: float32 `[b, n, d]`.

        Raises:
            UserError: images of another size or type than the config's.
        """
        return self.pieces.cut(images)

    def images_of(self, patches: Tensor) -> Tensor:
        """Undo `patches_of`; raises UserError where patches are frames."""
        return self.pieces.images(patches)

    def context_of(self, sample_index: Tensor, mask_ratio: float) -> Tensor:
        """Draw which patches of samples `[b]` are context: int64 `[b, c]`, without repetition."""
        plan = self.schedule.draw(sample_index, mask_ratio)
        return plan.order[:, : plan.num_content]

    def inputs_with(
        self, patches: Tensor, context: Tensor, num_placed: int | None = None
    ) -> tuple[Tensor, ...]:
        """Return the inputs for any patches `[b, n, d]` of which `context` `[b, c]` are seen.

        The first `num_placed` of the context show where they stand; as many as in pre-training
        when absent.
        """
        placed = context[:, : self.num_placed if num_placed is None else num_placed]
        if self.paper.class_token:
            context = F.pad(context + 1, (1, 0))
        return patches, context.contiguous(), placed.contiguous()

    def _inputs(self, patches: Tensor, plan: Arrangement) -> tuple[Tensor, ...]:
        return self.inputs_with(patches, plan.order[:, : plan.num_content], plan.num_placed)

    def blank_batch(self, num_images: int, device: torch.device) -> Batch:
        """Return black images, or frames of silence."""
        frames = self.config.data.frames
        if frames is None:
            return super().blank_batch(num_images, device)
        return blank_batch(num_images, frames, torch.float32, device)

    def sequence(self, batch: Batch) -> Sequence:
        """Draw the context; the targets are the patches' places."""
        patches = self.patches_of(batch.inputs)
        inputs = self._inputs(patches, self.schedule.draw(batch.sample_index))
        places = torch.arange(self.num_places, device=patches.device).expand(len(batch), -1)
        return Sequence(inputs, (places.scatter(1, inputs[-1], PLACED),))

    def inputs_for_features(
        self, inputs: Tensor, sample_index: Tensor | None
    ) -> tuple[Tensor, ...]:
        """Return the inputs in which all patches are seen, as in fine-tuning (section 3.3)."""
        return self.inputs_from(inputs)

    def inputs_from(
        self,
        inputs: Any,
        *,
        sample_index: Tensor | None = None,
        mask_ratio: float | None = None,
        **_: Any,
    ) -> tuple[Tensor, ...]:
        """Return patches, what is seen of them, and which are told where they stand.

        Args:
            inputs: images uint8 `[b, height, width, 3]` or frames float `[b, n, d]`.
            sample_index: int64 `[b]`, decides which patches are seen and told; when absent, all
                are (without positions in the config, nothing is told to any).
            mask_ratio: η; the config's when absent.
        """
        patches = self.patches_of(inputs)
        if sample_index is None:
            plan = self.schedule.for_features(len(patches), patches.device)
            return self._inputs(patches, plan)
        plan = self.schedule.draw(sample_index.to(patches.device), mask_ratio)
        return self._inputs(patches, plan)

    def loss(self, predictions: Tensor, targets: tuple[Tensor, ...]) -> Tensor:
        """Return nats a patch, over all patches (algorithm 1) that are not told where they stand.

        Args:
            predictions: logits `[b, tokens, n]`.
            targets: true places int64 `[b, n]`, `PLACED` where shown: as many in every image.
        """
        (places,) = targets
        nats = self.density.per_token_loss(predictions, places)
        return nats.sum() / (len(places) * (self.num_places - self.num_placed))

    def measures(self, predictions: Tensor, targets: tuple[Tensor, ...]) -> dict[str, Tensor]:
        """Return `accuracy` and `top5`: shares of patches whose true place is named so.

        Those that are told where they stand do not count.
        """
        (places,) = targets
        likeliest = self.outputs(predictions).topk(min(5, self.num_places), dim=-1).indices
        hits = likeliest == places[..., None]
        count = places.shape[0] * (self.num_places - self.num_placed)
        return {"accuracy": hits[..., 0].sum() / count, "top5": hits.sum() / count}

    def places(self) -> MP3:
        """Return itself: the model names the place of every patch."""
        return self
