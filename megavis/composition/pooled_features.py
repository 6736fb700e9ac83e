"""Condition on a whole image by the pooled features of a frozen tokenizer.

Legend: b images, e channels of a tokenizer's features.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from megavis.composition.codebook import open_ids_tokenizer
from megavis.composition.condition import Condition, Known
from megavis.composition.reader import Role
from megavis.composition.tokens import check_images
from megavis.config.errors import UserError
from megavis.data.loading.batch import Batch
from megavis.model.core import Core
from megavis.model.embeddings import ReplicatedLinear

if TYPE_CHECKING:
    from megavis.tokenizers.network_tokenizer import IdTokenizer


class PooledFeatures(Condition):
    """The mean of a frozen tokenizer's features, before quantization, over an image."""

    names = ("image",)
    roles: tuple[Role, ...] = ("front",)

    def __init__(self, image_size: int, *, size: int, tokenizer: str, size_key: str) -> None:
        """Build.

        Args:
            image_size: side of the images in pixels.
            size: e.
            tokenizer: run folder of the tokenizer.
            size_key: config key of `size`, for messages.
        """
        self.image_size, self.size, self.run_folder = image_size, size, tokenizer
        self.size_key = size_key

    @property
    def identity(self) -> str:
        """SHA-256 of the tokenizer."""
        return self.tokenizer.identity()

    def part(self, role: Role, core: Core) -> nn.Module | None:
        """Build the map from features to the first token."""
        return ReplicatedLinear(self.size, core.megatron.hidden_size) if role == "front" else None

    def training(self, batch: Batch) -> Known:
        """Return the features of a batch's images."""
        return self.for_features(batch.inputs)

    def for_features(self, samples: Tensor) -> Known:
        """Return the features float32 `[b, e]` of images uint8 `[b, H, W, 3]`.

        Raises:
            UserError: the images have the wrong size or type.
        """
        check_images(samples, self.image_size)
        return (self.tokenizer.to(samples.device).features(samples).mean(1),)

    def from_samples(self, samples: Tensor) -> Mapping[str, Tensor]:
        """Return the images."""
        return {"image": samples}

    def given(self, values: Mapping[str, Tensor], count: int, device: torch.device) -> Known:
        """Return the features of `image`; raise UserError if it is missing."""
        super().given(values, count, device)
        if "image" not in values:
            raise UserError("this model is conditioned on an image: give one")
        return self.for_features(values["image"].to(device))

    @cached_property
    def tokenizer(self) -> IdTokenizer:
        """The frozen tokenizer.

        Raises:
            UserError: it gives no ids, or does not fit the image or feature size.
        """
        opened = open_ids_tokenizer(self.run_folder)
        opened.num_tokens(self.image_size)
        if opened.feature_size != self.size:
            raise UserError(
                f"{self.run_folder} has features of {opened.feature_size} channels;"
                f" {self.size_key} is {self.size}"
            )
        return opened
