"""Train the VAE of label maps, whose latents GIVT predicts from images.

"GIVT: Generative Infinite-Vocabulary Transformers", section 4.2 and appendix 0.C.3: the autoencoder
of UViM, two Transformers trained by cross-entropy, with a Gaussian posterior instead of vector
quantization. Between them, the grid of tokens is resized to the grid of latents and back.

Legend: b maps; H and W, height and width in pixels; g groups of channels, C channels in total; n
patches of p × p pixels; h, hidden size; l × l latents of d channels.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from megavis.composition.autoencoder import posterior_noise
from megavis.composition.encoded_image import images_and_targets
from megavis.composition.encoded_tokens import painted_maps
from megavis.composition.trainable import Backbone, SequenceBatch, SumAndCount
from megavis.config.schema import RunConfig
from megavis.data.format.manifest import Manifest
from megavis.data.loading.loader import Batch
from megavis.model.core import BLOCKS, Core, StackSpec
from megavis.model.embeddings import (
    LastNorm,
    ReplicatedLinear,
    TokenHead,
    grid_positions,
    to_stream,
)
from megavis.model.flops import Workload
from megavis.model.layer_state import LayerState, PackedState, as_bits, from_bits
from megavis.model.parameters import (
    Initialization,
    normal,
    truncated_normal,
    xavier_uniform,
    zeros,
)
from megavis.model.stack import LayerPlan, block_plans
from megavis.papers.vae.config import LabelMapVAEConfig
from megavis.parallel.context import ParallelContext
from megavis.tokenizers.label_map_vae import (
    LabelChannels,
    LabelMapBottleneck,
    LabelMapInput,
    LabelMapShape,
    patch_pixels,
)
from megavis.tokenizers.vae import bounded_posterior

NOISE, MOMENTS = "noise", "moments"
"""Names of the tensors carried with the hidden states, in the encoder and in the decoder."""


class LabelMapVAEObjective(Backbone):
    """Reconstruct label maps through latents that are close to N(0, 1)."""

    config_type = LabelMapVAEConfig
    paper: LabelMapVAEConfig
    reconstructs = True
    carries_gradient = True
    """The gradient of the KL divergence reaches the encoder through the moments."""

    def __init__(self, config: RunConfig, context: ParallelContext) -> None:
        super().__init__(config, context)
        fills = Initialization(*[xavier_uniform] * 5)
        stack = StackSpec(BLOCKS, config.model, "full", fills, carried_names=(NOISE,))
        self.core = Core.create(config, context.megatron_groups(), stack)
        above = config.model.model_copy(update={"num_layers": self.paper.decoder_layers})
        self.decoder_core = self.core.with_stack(
            name="decoder", model=above, carried_names=(MOMENTS,)
        )

    @cached_property
    def shape(self) -> LabelMapShape:
        """Sizes of the network."""
        return LabelMapShape.from_config(self.config.model_dump())

    @property
    def channels(self) -> LabelChannels:
        """Groups of one-hot channels."""
        return self.shape.label_channels

    @property
    def num_tokens(self) -> int:
        """n, patches of a map."""
        return self.shape.grid**2

    def check_data(self, manifest: Manifest) -> Iterator[str]:
        """Check that the shards have maps of this kind, and a channel for each class."""
        target, paper = manifest.target, self.paper
        if target is None or target.kind != paper.target:
            what = manifest.kind if target is None else f"{target.kind} maps"
            yield f"holds {what}; objective.target {paper.target} needs pairs with such label maps"
        elif len(target.class_names) >= paper.semantic_channels:
            yield (
                f"holds {len(target.class_names)} classes; with void they do not fit into"
                f" objective.semantic_channels {paper.semantic_channels}"
            )

    def layer_plans(self) -> list[LayerPlan]:
        """Return the layers: input, encoder, bottleneck, decoder and head."""
        shape, seed, core, above = self.shape, self.config.seed, self.core, self.decoder_core
        outputs = shape.patch_size**2 * self.channels.num_channels
        below = Workload.of_one_stream(self.num_tokens, 0, causal=False)
        work = Workload.of_one_stream(self.num_tokens, outputs, causal=False)
        depth = core.model.num_layers + 1
        flops = 2 * shape.latent_grid**2 * shape.hidden_size * 3 * shape.latent_channels
        return [
            LayerPlan("embedding", lambda: PartitionedInput(core, shape), seed),
            *block_plans(core, below, seed=seed, depth=1),
            LayerPlan(
                "bottleneck",
                lambda: PartitionedBottleneck(core, above, shape),
                seed,
                depth,
                flops=flops,
            ),
            *block_plans(above, work, seed=seed, depth=depth + 1),
            LayerPlan(
                "head",
                lambda: TokenHead(above, outputs, zeros, also_return=MOMENTS),
                seed,
                depth + 1 + above.model.num_layers,
            ),
        ]

    def sequence(self, batch: Batch) -> SequenceBatch:
        """Return labels and noise as inputs, labels as targets."""
        inputs = self.inputs_from(batch.inputs, sample_index=batch.sample_index)
        return SequenceBatch(inputs, inputs[:1])

    def inputs_from(
        self, inputs: Any, *, sample_index: Tensor | None = None, **options: Any
    ) -> tuple[Tensor, ...]:
        """Return labels int64 `[b, g, H, W]` and noise `[b, d, l, l]`, encoded by `as_bits`.

        Args:
            inputs: pairs uint8 `[b, 2, H, W, 3]`, or maps `[b, H, W, 3]`.
            sample_index: int64 `[b]`, determines the noise; without it, the noise is zero, which
                decodes the posterior's mean.
        """
        self.check_options(options)
        labels = self.channels.labels(images_and_targets(inputs)[1])
        grid = self.shape.latent_grid
        shape = (self.paper.latent_channels, grid, grid)
        return labels, as_bits(posterior_noise(labels, shape, sample_index, self.config.seed))

    def loss(self, predictions: Any, targets: tuple[Tensor, ...]) -> Tensor:
        """Return cross-entropy plus β times the KL divergence, in nats, averaged over maps."""
        terms = self.terms(predictions, targets)
        return terms["cross_entropy"] + self.paper.beta * terms["kl"]

    def measures(self, predictions: Any, targets: tuple[Tensor, ...]) -> Mapping[str, SumAndCount]:
        """Return the unweighted terms of the loss as sums over maps."""
        terms, count = self.terms(predictions, targets), len(targets[0])
        return {name: (term * count, count) for name, term in terms.items()}

    def terms(self, predictions: Any, targets: tuple[Tensor, ...]) -> Mapping[str, Tensor]:
        """Return the unweighted terms of the loss in nats, averaged over maps.

        Args:
            predictions: logits `[b, n, p² · C]` and moments `[b, 2 d, l, l]`.
            targets: labels `[b, g, H, W]`.
        """
        patches, moments = predictions
        size = self.shape.patch_size
        logits = patches.unflatten(2, (size**2, -1)).flatten(1, 2).transpose(1, 2)
        labels = patch_pixels(targets[0], size).flatten(1, 2).transpose(1, 2)
        return {
            "cross_entropy": self.channels.loss(logits, labels).mean(),
            "kl": bounded_posterior(moments).kl().flatten(1).sum(1).mean(),
        }

    def logits(self, predictions: Any) -> Tensor:
        """Return logits `[b, C, H, W]` from the head's outputs."""
        return self.shape.logits(predictions[0])

    def outputs(self, predictions: Any) -> Tensor:
        """Return the posterior's moments `[b, 2 d, l, l]`: means, then log-variances."""
        moments: Tensor = predictions[1]
        return moments

    def shown(self, inputs: Tensor) -> Tensor:
        """Color label maps for display, uint8 `[b, H, W, 3]`."""
        return painted_maps(images_and_targets(inputs)[1], self.paper.target)

    def reconstruction(self, predictions: Any) -> Tensor:
        """Return the predicted maps, colored for display, uint8 `[b, H, W, 3]`."""
        return painted_maps(self.reconstructed_maps(predictions), self.paper.target)

    def reconstructed_maps(self, predictions: Any) -> Tensor:
        """Return the predicted maps, encoded as in shards, uint8 `[b, H, W, 3]`."""
        return self.channels.maps(self.logits(predictions))


class PartitionedInput(LabelMapInput):
    """The embedding of label maps with positions, for tokens that may be split."""

    def __init__(self, core: Core, shape: LabelMapShape) -> None:
        super().__init__(shape)
        self.core = core
        truncated_normal(len(self.table) ** -0.5)(self.table)
        fill = normal(shape.hidden_size**-0.5)
        self.positions = grid_positions(core, "learned", (shape.grid, shape.grid), fill=fill)

    def forward(self, inputs: tuple[Tensor, ...]) -> PackedState:
        """Embed labels int64 `[b, g, H, W]` as `[n, b, h]`, and carry the noise `[b, d, l, l]`."""
        labels, noise = inputs
        patches = self.embed(labels)
        places = torch.arange(patches.shape[1], device=labels.device)[None]
        hidden = self.positions(patches, places)
        return LayerState(to_stream(hidden, self.core), {NOISE: noise}).pack()


class PartitionedBottleneck(LabelMapBottleneck):
    """Map the encoder's output to the posterior, sample latents, and embed them for the decoder."""

    def __init__(self, below: Core, above: Core, shape: LabelMapShape) -> None:
        super().__init__(shape)
        self.below, self.above = below, above
        width, grid = shape.hidden_size, (shape.grid, shape.grid)
        # LeCun's initialization, Flax's default for dense layers.
        lecun = truncated_normal(width**-0.5)
        self.norm = LastNorm(below)
        self.moments = ReplicatedLinear(width, 2 * shape.latent_channels, lecun)
        from_latents = truncated_normal(shape.latent_channels**-0.5)
        self.linear = ReplicatedLinear(shape.latent_channels, width, from_latents)
        self.positions = grid_positions(above, "learned", grid, fill=normal(width**-0.5))

    def forward(self, state: PackedState) -> PackedState:
        """Map `[n, b, h]` to `[n, b, h]`, and carry means and log-variances `[b, 2 d, l, l]`."""
        stream = LayerState.unpack(state, self.below.carried_names)
        moments = self.moments_of(self.norm.whole(stream.hidden)).contiguous()
        noise = from_bits(stream.carried[NOISE])
        latents = bounded_posterior(moments).sample(noise).to(moments.dtype)
        tokens = self.tokens_of(latents)
        places = torch.arange(tokens.shape[1], device=tokens.device)[None]
        hidden = self.positions(tokens, places)
        return LayerState(to_stream(hidden, self.above), {MOMENTS: moments}).pack()
