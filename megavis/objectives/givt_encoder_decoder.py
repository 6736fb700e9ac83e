"""GIVT's encoder-decoder: latents predicted from an image ("GIVT", section 4.2, appendix B).

The paper's form for dense prediction, after UViM: GIVT-Causal with a cross-attention after each
self-attention, to what a Vision Transformer makes of an image.

Of pairs shards the encoder reads the image, and the VAE's latents of the target are predicted. Of
jpeg shards, which hold one image a sample, the image is both.

Legend: b images, n tokens, d numbers of a token, H and W pixels.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from megavis.config.choices import PositionKind
from megavis.config.errors import UserError
from megavis.data.batch import Batch
from megavis.data.manifest import Manifest
from megavis.model.core import MEMORY, Core
from megavis.model.drop_path import SAMPLES
from megavis.model.encoder import Encoder, encoder_model
from megavis.model.flops import Workload, training_flops
from megavis.model.stream import State, Stream
from megavis.objectives.base import Objective, Sequence
from megavis.objectives.generates import Known, OnFirstStage
from megavis.objectives.givt import GIVT
from megavis.objectives.givt_base import Labels
from megavis.objectives.givt_encoder_decoder_config import EncoderDecoderConfig
from megavis.objectives.givt_layers import CausalEmbedding
from megavis.objectives.trainable import Likelihood


class ConditionedEmbedding(CausalEmbedding):
    """Tokens of latents as the causal model has them, and the memory that blocks attend to."""

    paper: EncoderDecoderConfig

    def __init__(
        self, core: Core, paper: EncoderDecoderConfig, positions: PositionKind, *, num_rows: int
    ) -> None:
        super().__init__(core, paper, positions, num_rows=num_rows)
        self.encoder = Encoder(
            core, num_layers=paper.encoder_layers, patch_size=paper.encoder_patch_size
        )

    def memory(self, images: Tensor) -> Tensor:
        """Encode images `[b, H, W, 3]`, once for all tokens that are drawn: `[b, c, h]`."""
        encoded: Tensor = self.encoder(images)
        return encoded.transpose(0, 1)

    def forward(self, inputs: tuple[Tensor, ...]) -> State:
        """Embed what `CausalEmbedding` does, and encode the last input.

        Args:
            inputs: those of `CausalEmbedding`, then images `[b, H, W, 3]`, or what `memory` gave.
        """
        *own, seen = inputs
        memory = self.memory(seen) if seen.ndim == 4 else seen
        names = [name for name in self.core.carries if name not in (MEMORY, SAMPLES)]
        stream = Stream.unpack(super().forward(tuple(own)), names)
        carried = {**stream.carried, MEMORY: memory.transpose(0, 1).contiguous()}
        return Stream(stream.hidden, carried).pack()


class LabelsAndImage(Labels):
    """The class, where there are any, and the image that the encoder reads."""

    names = ("labels", "image")
    paper: GIVTEncoderDecoder

    def given(self, values: Mapping[str, Tensor], count: int, device: torch.device) -> Known:
        """Return the rows of the labels, and the images as the encoder reads them."""
        rows = super().given(values, count, device)
        if "image" not in values:
            raise UserError("this model predicts from images: give those that its encoder reads")
        return *rows, self.paper.encoder_input(values["image"].to(device))

    def prepare(self, known: Known, on_first_stage: OnFirstStage) -> Known:
        """Encode the images, once for all tokens."""
        *rows, images = known

        def encode(layer: nn.Module) -> Tensor:
            assert isinstance(layer, ConditionedEmbedding)
            return layer.memory(images)

        return *rows, on_first_stage(encode)

    def usual(self, num_images: int, examples: Batch | None) -> Mapping[str, Tensor]:
        """Return the images and classes of examples."""
        if examples is None:
            raise UserError("predictions from images need images: give data.validation")
        images, _ = self.paper.images_and_targets(examples.inputs)
        return {"image": images, "labels": examples.labels}

    def balanced(self, numbers: Tensor) -> Mapping[str, Tensor]:
        """Refuse: every image is drawn from another."""
        raise UserError(f"runs of {self.paper.paper.name} draw no images from nothing")

    def shown(self, examples: Batch) -> list[Tensor]:
        """Return images and targets."""
        return list(self.paper.images_and_targets(examples.inputs))


class GIVTEncoderDecoder(GIVT):
    """Next-token prediction of latents, given an image."""

    config_type = EncoderDecoderConfig
    num_copies = 3

    @property
    def conditioned(self) -> EncoderDecoderConfig:
        """The paper's section of the config."""
        assert isinstance(self.config.objective, EncoderDecoderConfig)
        return self.config.objective

    @property
    def carries(self) -> tuple[str, ...]:
        """The encoder's memory as well."""
        return (*super().carries, MEMORY)

    @property
    def carries_gradient(self) -> bool:
        """The encoder learns from what blocks read of its memory."""
        return True

    def workload(self) -> Workload:
        """Return that of the causal blocks, which attend to the encoder's patches."""
        tokens, patches = self.num_tokens, self.conditioned.num_patches(self.config)
        visible = (tokens + 1) / 2
        return Workload(tokens, tokens, visible, tokens, self.num_outputs, num_memory=patches)

    def flops_per_image(self) -> float:
        """Count the encoder as well, its first matrix as a last one."""
        paper = self.conditioned
        model = encoder_model(self.config.model, paper.encoder_layers)
        numbers, patches = 3 * paper.encoder_patch_size**2, paper.num_patches(self.config)
        encoder = Workload.of_one_stream(patches, numbers, causal=False)
        return super().flops_per_image() + training_flops(model, encoder)

    def check_data(self, manifest: Manifest) -> Iterator[str]:
        """Want images, with targets or without, and the VAE that makes latents of them."""
        name, kind = self.config.objective.name, manifest.kind
        if kind == "latents":
            yield f"holds latents without their images, which the encoder of {name} reads"
        elif kind not in ("pairs", "jpeg"):
            yield f"holds {kind} shards; {name} wants pairs shards"
        elif self.paper.tokenizer is None:
            yield f"holds {kind} shards; name the VAE's run folder in objective.tokenizer"
        yield from self._check_labels(len(manifest.class_names))

    def build_embedding(self) -> ConditionedEmbedding:
        """Return labels, latents and positions, and the encoder."""
        return ConditionedEmbedding(
            self.core, self.conditioned, self.position_kind, num_rows=self.num_label_rows
        )

    @cached_property
    def condition(self) -> LabelsAndImage:
        """The image that the encoder reads, and the class."""
        return LabelsAndImage(self)

    def blank_batch(self, num_images: int, device: torch.device) -> Batch:
        """Return black images."""
        return Objective.blank_batch(self, num_images, device)

    def images_and_targets(self, inputs: Tensor) -> tuple[Tensor, Tensor]:
        """Return what is read and what is predicted, of what shards hold; twice images alone."""
        images, targets = inputs.unbind(1) if inputs.ndim == 5 else (inputs, inputs)
        return images, targets

    def sequence(self, batch: Batch) -> Sequence:
        """Draw latents of the targets, and show the images to the encoder."""
        images, targets = self.images_and_targets(batch.inputs)
        latents = self.latents(targets, batch.sample_index)
        inputs = (latents, self.training_rows(batch), self.encoder_input(images))
        return Sequence(inputs, self.plain_targets(latents))

    def inputs_for_features(
        self, inputs: Tensor, sample_index: Tensor | None
    ) -> tuple[Tensor, ...]:
        """Return the latents of the targets with the null label in front, and the images."""
        images, targets = self.images_and_targets(inputs)
        return self.inputs_from(targets, image=images, sample_index=sample_index)

    def encoder_input(self, images: Tensor) -> Tensor:
        """Return what the encoder reads, float32 `[b, H, W, 3]` from -1 to 1.

        Args:
            images: uint8, or float in that range already.

        Raises:
            UserError: they have another shape.
        """
        side = self.config.data.image_size
        if images.shape[1:] != (side, side, 3):
            raise UserError(
                f"the images that the encoder reads have shape {list(images.shape)}; this run takes"
                f" [b, {side}, {side}, 3], uint8 or from -1 to 1"
            )
        return images.float() / 127.5 - 1.0 if images.dtype == torch.uint8 else images.float()

    def inputs_from(
        self,
        inputs: Any,
        *,
        image: Tensor | None = None,
        labels: Tensor | None = None,
        sample_index: Tensor | None = None,
        **_: Any,
    ) -> tuple[Tensor, ...]:
        """Return what the first layer takes.

        Args:
            inputs: as `latents` takes them. Tokens pass the adapter by.
            image: what the encoder reads, as `encoder_input` takes it; the inputs when absent.
            labels: int64 `[b]`; -1 or None: no class.
            sample_index: as `latents` takes it.

        Raises:
            UserError: a shape or a label is wrong.
        """
        latents = self.latents(inputs, sample_index)
        rows = self.label_rows(labels, len(latents), latents.device)
        seen = self.encoder_input(inputs if image is None else image.to(latents.device))
        return latents, rows, seen

    @property
    def likelihood(self) -> Likelihood:
        """That of the causal model, given the image."""
        own = super().likelihood
        return replace(own, given="the image" + (f" and {own.given}" if own.given else ""))
