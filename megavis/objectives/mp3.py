"""MP3: Position Prediction as an Effective Pretraining Strategy (Zhai et al., 2022).

An image is a set of patches: nobody tells the network where they stood. Queries come from all
patches, keys and values from a random share 1 - η of them, the context (section 3.2). A linear head
names the place of every patch, context and masked alike (algorithm 1).

Algorithm 1 keeps η of the patches as context; the text keeps 1 - η, which is followed here. The
class token stands in front (section 3.1 and appendix A); the paper does not say whether others see
it, here they do, at every η.

Legend: b images, n patches, c of them context, d numbers of a patch, h hidden size.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Literal

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from megavis.config.schema import Complaint, Fraction, ObjectiveConfig, RunConfig
from megavis.data.batch import Batch
from megavis.data.manifest import Manifest
from megavis.model.core import Core
from megavis.model.embeddings import to_stream
from megavis.model.flops import Workload
from megavis.model.init import Initialization, normal
from megavis.model.patches import PatchEmbedding, TokenHead
from megavis.model.positions import Positions, grid_coordinates
from megavis.model.stream import State, Stream
from megavis.model.visibility import Kind
from megavis.objectives.base import Objective, Sequence
from megavis.parallel.random import uniform
from megavis.tokenizers.patches import patchify, standardize, to_uint8, unpatchify


class MP3Config(ObjectiveConfig):
    """The keys of MP3."""

    name: Literal["mp3"] = "mp3"
    mask_ratio: Fraction = 0.75
    """η: share of the patches that give no keys and values (section 3.2)."""
    patch_size: Annotated[int, Field(gt=0)] = 16
    """Side of a patch in pixels (table 1)."""
    class_token: bool = True
    """A learned token in front of the patches, which all of them see (section 3.1)."""

    def check(self, config: RunConfig) -> Iterator[Complaint]:
        """Want whole patches, no positions, and tokens that sequence parallelism can share."""
        side, parallel = config.data.image_size, config.parallel
        if side % self.patch_size:
            text = f"{self.patch_size} does not divide data.image_size {side}"
            yield "objective.patch_size", text
        yield from self._check_positions(config)
        num_tokens = (side // self.patch_size) ** 2 + self.class_token
        if parallel.sequence_parallel and num_tokens % parallel.tensor_model_parallel_size:
            remedy = "objective.class_token" if self.class_token else "it"
            yield (
                "parallel.sequence_parallel",
                f"{num_tokens} tokens do not divide by tensor_model_parallel_size"
                f" {parallel.tensor_model_parallel_size}; set {remedy} to false",
            )

    def _check_positions(self, config: RunConfig) -> Iterator[Complaint]:
        """Positions come with fine-tuning, added to the patches (section 3.3)."""
        kind, tuning = config.model.positions, config.finetune
        if kind in (None, "none"):
            return
        if tuning is None or tuning.generative_weight:
            yield "model.positions", f"{kind} tells what the model has to find out; leave it away"
        elif kind not in ("learned", "sincos"):
            yield "model.positions", f"{kind} is not added to patches; use learned, sincos or none"


class SetEmbedding(nn.Module):
    """Embeds patches alike wherever they stand, behind a class token.

    In fine-tuning positions may be added to the patches; the class token has none.
    """

    def __init__(self, core: Core, patch_width: int, *, side: int, class_token: bool) -> None:
        super().__init__()
        self.core = core
        self.patches = PatchEmbedding(patch_width, core.megatron.hidden_size)
        self.positions = Positions(
            core.config.model.positions or "none",
            height=side,
            width=side,
            hidden_size=core.megatron.hidden_size,
            fill=normal(0.02),
        )
        self.register_buffer("places", grid_coordinates(side, side), persistent=False)
        self.class_token: nn.Parameter | None = None
        if class_token:
            self.class_token = nn.Parameter(torch.empty(core.megatron.hidden_size))
            nn.init.normal_(self.class_token, std=0.02)

    def forward(self, inputs: tuple[Tensor, ...]) -> State:
        """Embed.

        Args:
            inputs: patches float32 `[b, n, d]`, and places int64 `[b, c]`, among the tokens, of
                those that are seen.

        Returns:
            `[n, b, h]`, or `[n + 1, b, h]` with the class token, and the places as `context`.
        """
        patches, context = inputs
        hidden = self.positions(self.patches(patches), self.places)
        if self.class_token is not None:
            hidden = torch.cat([self.class_token.expand(len(hidden), 1, -1), hidden], dim=1)
        return Stream(to_stream(hidden, self.core), {"context": context}).pack()


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
        """Places of the tokens that are seen."""
        return ("context",)

    @property
    def num_places(self) -> int:
        """Patches n of an image, and places that each may have come from."""
        return (self.config.data.image_size // self.paper.patch_size) ** 2

    @property
    def num_tokens(self) -> int:
        """Patches and the class token."""
        return self.num_places + self.paper.class_token

    @property
    def num_outputs(self) -> int:
        """One logit a place."""
        return self.num_places

    def num_context(self, mask_ratio: float) -> int:
        """Return how many patches c are seen: 1 - η of them, and at least one."""
        return max(1, round((1.0 - mask_ratio) * self.num_places))

    def workload(self) -> Workload:
        """Count keys and values of the context alone."""
        seen = self.num_context(self.paper.mask_ratio) + self.paper.class_token
        return Workload(self.num_tokens, seen, float(seen), self.num_tokens, self.num_outputs)

    def check_data(self, manifest: Manifest) -> Iterator[str]:
        """Want photographs of the config's size."""
        if manifest.kind != "jpeg":
            yield f"holds {manifest.kind} shards; {self.paper.name} wants jpeg shards"

    def initialization(self) -> Initialization:
        """Return N(0, 0.02²) for every matrix, as DeiT, whose settings section 4.2 follows."""
        fill = normal(0.02)
        return Initialization(fill, fill, fill, fill, fill)

    def build_embedding(self) -> nn.Module:
        """Return the embedding of patches, without positions but in fine-tuning."""
        side = self.config.data.image_size // self.paper.patch_size
        width = 3 * self.paper.patch_size**2
        return SetEmbedding(self.core, width, side=side, class_token=self.paper.class_token)

    def build_head(self) -> nn.Module:
        """Return the last norm and the matrix to one logit a place."""
        return TokenHead(self.core, self.num_places, normal(0.02))

    @property
    def mask_ratio(self) -> float:
        """η in training."""
        return self.paper.mask_ratio

    def patches_of(self, images: Tensor) -> Tensor:
        """Cut uint8 `[b, height, width, 3]` into standardized patches: float32 `[b, n, d]`."""
        return patchify(standardize(images), self.paper.patch_size)

    def images_of(self, patches: Tensor) -> Tensor:
        """Undo `patches_of`."""
        return to_uint8(unpatchify(patches, self.paper.patch_size))

    def choose(self, sample_index: Tensor, mask_ratio: float) -> Tensor:
        """Draw which patches are context.

        Args:
            sample_index: int64 `[b]`; the draw is a function of it and the run's seed.
            mask_ratio: η in [0, 1).

        Returns:
            int64 `[b, c]`, places among the patches, without repetition.
        """
        draws = uniform(sample_index, self.num_places, seed=self.config.seed, purpose="context")
        # Stable: equal draws, one in 2^24, fall alike on every device.
        return draws.argsort(dim=1, stable=True)[:, : self.num_context(mask_ratio)]

    def inputs_with(self, patches: Tensor, context: Tensor) -> tuple[Tensor, ...]:
        """Return the inputs for any patches `[b, n, d]` of which `context` `[b, c]` are seen."""
        if self.paper.class_token:
            context = F.pad(context + 1, (1, 0))
        return patches, context.contiguous()

    def sequence(self, batch: Batch) -> Sequence:
        """Draw the context; the targets are the patches' places."""
        inputs = self.inputs_from(batch.inputs, sample_index=batch.sample_index)
        places = torch.arange(self.num_places, device=batch.inputs.device)
        return Sequence(inputs, (places.expand(len(batch), -1).contiguous(),))

    def feature_inputs(self, batch: Batch) -> tuple[Tensor, ...]:
        """Return the inputs in which all patches are seen, as in fine-tuning (section 3.3)."""
        return self.inputs_from(batch.inputs)

    def inputs_from(
        self,
        inputs: Any,
        *,
        sample_index: Tensor | None = None,
        mask_ratio: float | None = None,
        **_: Any,
    ) -> tuple[Tensor, ...]:
        """Return patches and what is seen of them.

        Args:
            inputs: images uint8 `[b, height, width, 3]`.
            sample_index: int64 `[b]`, decides which patches are seen; all are when absent.
            mask_ratio: η; the config's when absent.
        """
        patches = self.patches_of(inputs)
        if sample_index is None:
            everything = torch.arange(self.num_places, device=patches.device)
            return self.inputs_with(patches, everything.expand(len(patches), -1))
        ratio = self.paper.mask_ratio if mask_ratio is None else mask_ratio
        return self.inputs_with(patches, self.choose(sample_index.to(patches.device), ratio))

    def loss(self, predictions: Tensor, targets: tuple[Tensor, ...]) -> Tensor:
        """Return nats a patch, over all patches (algorithm 1).

        Args:
            predictions: logits `[b, tokens, n]`.
            targets: true places int64 `[b, n]`.
        """
        (places,) = targets
        return F.cross_entropy(self.outputs(predictions).float().transpose(1, 2), places)

    def measures(self, predictions: Tensor, targets: tuple[Tensor, ...]) -> dict[str, Tensor]:
        """Return `accuracy`, the share of patches whose likeliest place is the true one."""
        (places,) = targets
        return {"accuracy": (self.outputs(predictions).argmax(-1) == places).float().mean()}

    def outputs(self, predictions: Tensor) -> Tensor:
        """Return a logit for each place of each patch: `[b, n, n]`."""
        return predictions[:, 1:] if self.paper.class_token else predictions
