"""An image as a condition: an encoder reads it, and the blocks attend to the encoder's output.

The encoder's patches are a part of the first layer, its blocks a stack of their own
(`model/encoder.py`).

Of pairs shards the encoder reads the image, and tokens are made of the target. Of jpeg shards,
which hold one image a sample, the image is both.

Legend: b images, H and W pixels.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn

from megavis.composition.condition import Condition, Encode, Known
from megavis.composition.reader import Reader, Role
from megavis.composition.tokens import Tokens
from megavis.config.errors import UserError
from megavis.data.format.manifest import Manifest
from megavis.data.loading.batch import Batch
from megavis.model.core import Core
from megavis.model.declarations import add_options
from megavis.model.encoder import EncoderInput, EncoderSizes
from megavis.model.layer_state import LayerState, PackedState
from megavis.model.stack import LayerPlan

_NAME = "embedding.encoder"
"""Begins the names of the encoder's parameters; some are in the first layer, `embedding`."""


class EncodedImage(Condition):
    """An image, after whatever else is known."""

    reads_images = True

    def __init__(
        self, image_size: int, sizes: EncoderSizes, *, others: Condition | None = None
    ) -> None:
        """Build.

        Args:
            image_size: side of the images in pixels.
            sizes: of the encoder.
            others: what else is known; nothing when None.
        """
        self.image_size, self.sizes = image_size, sizes
        self.others = others or Condition()
        self.names = (*self.others.names, "image")
        self.roles: tuple[Role, ...] = (*self.others.roles, "memory")

    @property
    def num_memory(self) -> int:
        """Patches that the encoder reads."""
        return self.sizes.num_patches(self.image_size)

    def layers(self, core: Core, *, num_rows: int, seed: int) -> list[LayerPlan]:
        """Return the encoder's blocks and its last norm."""
        size = self.image_size
        return self.sizes.layers(core, image_size=size, num_rows=num_rows, seed=seed, name=_NAME)

    def check(self, manifest: Manifest, tokens: Tokens, name: str) -> Iterator[str]:
        """Check that the shards hold images, with targets or without."""
        if manifest.kind not in ("pairs", "jpeg"):
            text = f"holds {manifest.kind} without their images, which the encoder of {name} reads"
            yield f"{text}; give pairs or jpeg shards"
            return
        images = manifest.model_copy(update={"kind": "jpeg"})
        yield from self.others.check(images, tokens, name)

    def part(self, role: Role, core: Core) -> nn.Module | nn.Parameter | None:
        """Build what embeds the encoder's patches, or a part of the others."""
        if role != "memory":
            return self.others.part(role, core)
        layer = EncoderInput(self.sizes.core(core, _NAME), patch_size=self.sizes.patch_size)
        add_options(layer.parameters(), self.sizes.options)
        return layer

    def predicted(self, samples: Tensor) -> Tensor:
        """Return the targets."""
        return images_and_targets(samples)[1]

    def training(self, batch: Batch) -> Known:
        """Return the images as the encoder reads them, after the others."""
        images, _ = images_and_targets(batch.inputs)
        return *self.others.training(batch), self.encoder_input(images)

    def for_features(self, samples: Tensor) -> Known:
        """Return the images, after what features may know of the others."""
        images, _ = images_and_targets(samples)
        return *self.others.for_features(samples), self.encoder_input(images)

    def given(self, values: Mapping[str, Tensor], count: int, device: torch.device) -> Known:
        """Return the images as the encoder reads them, after the others."""
        others = {name: value for name, value in values.items() if name != "image"}
        known = self.others.given(others, count, device)
        if "image" not in values:
            raise UserError("this model predicts from images: give those that its encoder reads")
        return *known, self.encoder_input(values["image"].to(device))

    def found_in(self, samples: Tensor) -> Mapping[str, Tensor]:
        """Return the images."""
        return {"image": images_and_targets(samples)[0]}

    def nothing(self, known: Known) -> Known:
        """Return the same images, without the others."""
        *others, images = known
        return *self.others.nothing(tuple(others)), images

    def prepare(self, known: Known, encode: Encode) -> Known:
        """Encode the images, once for all tokens."""
        *others, images = known

        def embed(layer: nn.Module) -> PackedState:
            assert isinstance(layer, Reader)
            patches: LayerState = layer.part("memory")(images)
            return patches.pack()

        return *others, encode(embed)

    def usual(self, num_images: int, examples: Batch | None) -> Mapping[str, Tensor]:
        """Return the images of examples, and what else is known of them."""
        if examples is None:
            raise UserError("predictions from images need images: give data.validation")
        return {**self.found_in(examples.inputs), **self.others.usual(num_images, examples)}

    def balanced(self, numbers: Tensor) -> Mapping[str, Tensor]:
        """Refuse: every image is drawn from another."""
        raise UserError("runs that predict from images generate no images from nothing")

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


def images_and_targets(samples: Tensor) -> tuple[Tensor, Tensor]:
    """Return what is read and what is predicted, of what shards hold; twice images alone."""
    is_pair = samples.ndim == 5 and samples.shape[-1] == 3
    images, targets = samples.unbind(1) if is_pair else (samples, samples)
    return images, targets
