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

from megavis.composition.condition import Known, Labels, OnFirstStage
from megavis.composition.reader import Reader, Role
from megavis.composition.tokens import blank_batch
from megavis.composition.trainable import Likelihood
from megavis.config.errors import UserError
from megavis.data.format.manifest import Manifest
from megavis.data.loading.batch import Batch
from megavis.model.core import Core
from megavis.model.encoder import Encoder, core_of_encoder
from megavis.model.flops import Workload
from megavis.model.stack import PlannedStack
from megavis.papers.givt.encoder_decoder_config import EncoderDecoderConfig
from megavis.papers.givt.paper import GIVT


class LabelsAndImage(Labels):
    """The class, where there are any, and the image that the encoder reads."""

    names = ("labels", "image")
    roles: tuple[Role, ...] = ("start", "memory")

    def __init__(self, paper: EncoderDecoderConfig, *, image_size: int, seed: int) -> None:
        super().__init__(paper.num_classes, dropout=paper.label_dropout, seed=seed)
        self.paper, self.image_size = paper, image_size

    def part(self, role: Role, core: Core) -> nn.Module | nn.Parameter | None:
        """Build the table, or the encoder."""
        if role != "memory":
            return super().part(role, core)
        layers, size = self.paper.encoder_layers, self.paper.encoder_patch_size
        return Encoder(core, num_layers=layers, patch_size=size)

    def training(self, batch: Batch) -> Known:
        """Return the rows of the labels, and the images as the encoder reads them."""
        images, _ = images_and_targets(batch.inputs)
        return *super().training(batch), self.encoder_input(images)

    def for_features(self, samples: Tensor) -> Known:
        """Return the null label, and the images."""
        images, _ = images_and_targets(samples)
        return *super().for_features(samples), self.encoder_input(images)

    def given(self, values: Mapping[str, Tensor], count: int, device: torch.device) -> Known:
        """Return the rows of the labels, and the images as the encoder reads them."""
        rows = super().given(values, count, device)
        if "image" not in values:
            raise UserError("this model predicts from images: give those that its encoder reads")
        return *rows, self.encoder_input(values["image"].to(device))

    def found_in(self, samples: Tensor) -> Mapping[str, Tensor]:
        """Return the images."""
        return {"image": images_and_targets(samples)[0]}

    def prepare(self, known: Known, on_first_stage: OnFirstStage) -> Known:
        """Encode the images, once for all tokens."""
        *rows, images = known

        def encode(layer: nn.Module) -> Tensor:
            assert isinstance(layer, Reader)
            return layer.encoded(images)

        return *rows, on_first_stage(encode)

    def usual(self, num_images: int, examples: Batch | None) -> Mapping[str, Tensor]:
        """Return the images and classes of examples."""
        if examples is None:
            raise UserError("predictions from images need images: give data.validation")
        images, _ = images_and_targets(examples.inputs)
        return {"image": images, "labels": examples.labels}

    def balanced(self, numbers: Tensor) -> Mapping[str, Tensor]:
        """Refuse: every image is drawn from another."""
        raise UserError(f"runs of {self.paper.name} draw no images from nothing")

    def shown(self, examples: Batch) -> list[Tensor]:
        """Return images and targets."""
        return list(images_and_targets(examples.inputs))

    def encoder_input(self, images: Tensor) -> Tensor:
        """Return what the encoder reads, float32 `[b, H, W, 3]` from -1 to 1.

        Args:
            images: uint8, or float in that range already.

        Raises:
            UserError: they have another shape.
        """
        side = self.image_size
        if images.shape[1:] != (side, side, 3):
            raise UserError(
                f"the images that the encoder reads have shape {list(images.shape)}; this run takes"
                f" [b, {side}, {side}, 3], uint8 or from -1 to 1"
            )
        return images.float() / 127.5 - 1.0 if images.dtype == torch.uint8 else images.float()


def images_and_targets(inputs: Tensor) -> tuple[Tensor, Tensor]:
    """Return what is read and what is predicted, of what shards hold; twice images alone."""
    images, targets = inputs.unbind(1) if inputs.ndim == 5 else (inputs, inputs)
    return images, targets


class GIVTEncoderDecoder(GIVT):
    """Next-token prediction of latents, given an image."""

    config_type = EncoderDecoderConfig
    paper: EncoderDecoderConfig
    num_copies = 3

    @cached_property
    def condition(self) -> LabelsAndImage:
        """The image that the encoder reads, and the class."""
        size = self.config.data.image_size
        return LabelsAndImage(self.paper, image_size=size, seed=self.config.seed)

    @property
    def part_names(self) -> Mapping[Role, str]:
        """Those of the causal model, and the encoder."""
        return {**super().part_names, "memory": "encoder"}

    def workload(self) -> Workload:
        """Return that of the causal blocks, which attend to the encoder's patches."""
        tokens, patches = self.num_tokens, self.paper.num_patches(self.config)
        visible = (tokens + 1) / 2
        return Workload(tokens, tokens, visible, tokens, self.num_outputs, num_memory=patches)

    def encoder(self) -> PlannedStack:
        """Return the encoder's blocks, the map of patches below them counted as one above."""
        numbers, patches = 3 * self.paper.encoder_patch_size**2, self.paper.num_patches(self.config)
        work = Workload.of_one_stream(patches, numbers, causal=False)
        return PlannedStack(core_of_encoder(self.core, self.paper.encoder_layers), work, "once")

    def check_data(self, manifest: Manifest) -> Iterator[str]:
        """Want images, with targets or without, and the VAE that makes latents of them."""
        name, kind = self.config.objective.name, manifest.kind
        if kind == "latents":
            yield f"holds latents without their images, which the encoder of {name} reads"
        elif kind not in ("pairs", "jpeg"):
            yield f"holds {kind} shards; {name} wants pairs shards"
        elif self.paper.tokenizer is None:
            yield f"holds {kind} shards; name the VAE's run folder in objective.tokenizer"
        yield from self.condition.check_classes(len(manifest.class_names))

    def blank_batch(self, num_images: int, device: torch.device) -> Batch:
        """Return black images."""
        side = self.config.data.image_size
        return blank_batch(num_images, (side, side, 3), torch.uint8, device)

    def samples(self, inputs: Any) -> Any:
        """Return the targets."""
        return images_and_targets(inputs)[1]

    @property
    def likelihood(self) -> Likelihood:
        """That of the causal model, given the image."""
        own = super().likelihood
        assert own is not None
        return replace(own, given="the image" + (f" and {own.given}" if own.given else ""))
