"""Conditions of a model: none, the class of an image, or pooled features of an image.

For an encoder's output, see `encoded_image.py`.

Legend: b images, e channels of a tokenizer's features.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import cached_property
from typing import Any, Literal

import torch
from torch import Tensor, nn

from megavis.composition.encoded_tokens import open_ids_tokenizer
from megavis.composition.parts import EmbeddingTable, Role
from megavis.composition.tokens import OWN, Key, Tokens, check_images
from megavis.config.errors import UserError, blame
from megavis.data.format.manifest import Manifest
from megavis.data.loading.loader import Batch
from megavis.model.core import Core
from megavis.model.embeddings import ReplicatedLinear
from megavis.model.layer_state import PackedState
from megavis.model.parameters import normal
from megavis.model.stack import LayerPlan
from megavis.parallel.random import uniform
from megavis.tokenizers.network_tokenizer import FrozenEncoder, IdTokenizer

Known = tuple[Tensor, ...]
"""Conditions as inputs of the first layer; batch first."""

Encode = Callable[[Callable[[nn.Module], PackedState]], Tensor]
"""Runs an encoder on the state that a function computes with the first layer; returns the memory
`[b, c, h]` on every process."""


class Condition:
    """No condition; the base class of the others."""

    names: tuple[str, ...] = ()
    """Names of the conditions that a user can pass: `labels`, `image`."""
    roles: tuple[Role, ...] = ()
    """Roles of the first layer's parts that embed them, in the order of `Known`."""
    reads_images: bool = False
    """True if samples must be images, whatever the tokens."""
    given_text: str | None = None
    """Description of what a likelihood is conditioned on; None: nothing."""

    @property
    def num_memory(self) -> int:
        """Number of encoder tokens that the blocks attend to."""
        return 0

    def layers(self, core: Core, *, num_rows: int, seed: int) -> list[LayerPlan]:
        """Return the layers after the first one that encode a condition, if there are any.

        Args:
            core: core of the blocks that attend to it.
            num_rows: rows of an image in these blocks.
        """
        return []

    def check(self, manifest: Manifest, tokens: Tokens, name: str) -> Iterator[str]:
        """Yield a message for each reason why shards do not suit these tokens in paper `name`."""
        yield from tokens.check(manifest, name)

    @property
    def identity(self) -> str | None:
        """SHA-256 of the frozen network that computes the condition; None without one."""
        return None

    @property
    def frozen_encoder(self) -> FrozenEncoder | None:
        """The frozen network that computes the condition in training; None without one."""
        return None

    def part(self, role: Role, core: Core) -> nn.Module | nn.Parameter | None:
        """Build the part of the first layer with this role; None if the condition has none."""
        return None

    def predicted(self, samples: Any) -> Any:
        """Return the part of the samples that tokens are made from, by default all of it."""
        return samples

    def training(self, batch: Batch) -> Known:
        """Return the conditions for training; random draws are functions of seed and sample."""
        return ()

    def for_features(self, samples: Tensor) -> Known:
        """Return the conditions for features of samples, which never include the class."""
        return ()

    def given(self, values: Mapping[str, Tensor], count: int, device: torch.device) -> Known:
        """Return conditions of `count` images for a user's values, or raise UserError."""
        for name in values:
            if name not in self.names:
                raise UserError(f"this model is not conditioned on {name}")
        return ()

    def from_samples(self, samples: Tensor) -> Mapping[str, Tensor]:
        """Return the conditions contained in samples, by name."""
        return {}

    def null(self, known: Known) -> Known:
        """Return the null condition like `known`; raise UserError if it was not trained."""
        raise UserError(
            "guidance needs a model conditioned on classes, and trained without them as well; this"
            " one has no classes"
        )

    def prepare(self, known: Known, encode: Encode) -> Known:
        """Compute what all steps of generation share."""
        return known

    def defaults(self, num_images: int, examples: Batch | None) -> Mapping[str, Tensor]:
        """Return default conditions for a grid of `num_images` generated images.

        Args:
            examples: images to complete, or to condition on.

        Raises:
            UserError: the model needs examples and there are none.
        """
        return {}

    def balanced(self, numbers: Tensor) -> Mapping[str, Tensor]:
        """Return evenly distributed conditions for images int64 `[b]`, or raise UserError."""
        return {}

    def shown(self, examples: Batch) -> list[Tensor]:
        """Return images uint8 `[b, H, W, 3]` to show before those generated from them."""
        return []


class Labels(Condition):
    """The class of an image: a row of a table, whose last row may be the null label.

    Args:
        num_classes: number of classes.
        role: role of its part: the start token, or a row in front of all others.
        dropout: probability of the null label in training; 0: there is no null label.
        seed: the run's seed; label dropout is a function of seed and sample.
        deviation: initial standard deviation of the table.
        key: maps `num_classes` and `dropout` to config keys, for messages.
    """

    names: tuple[str, ...] = ("labels",)

    def __init__(
        self,
        num_classes: int,
        *,
        role: Literal["start", "front"] = "start",
        dropout: float,
        seed: int,
        deviation: float = 1.0,
        key: Key = OWN,
    ) -> None:
        self.num_classes, self.dropout, self.seed = num_classes, dropout, seed
        self.roles: tuple[Role, ...] = (role,)
        self.deviation, self.key = deviation, key
        self.given_text = "the class"
        self.given_text += f", but for the {dropout:.0%} that training drops" if dropout else ""
        self.has_null_label = dropout > 0
        self.num_rows = num_classes + int(self.has_null_label)
        self.null_row = self.num_rows - 1

    def part(self, role: Role, core: Core) -> nn.Module | nn.Parameter | None:
        """Build the table."""
        if role != self.roles[0]:
            return None
        return EmbeddingTable(self.num_rows, core.megatron.hidden_size, normal(self.deviation))

    def training(self, batch: Batch) -> Known:
        """Return rows int64 `[b]` of the labels, with the null row for absent or dropped ones."""
        rows = self._rows(batch.labels)
        if not self.has_null_label:
            return (rows,)
        draws = uniform(batch.sample_index, 1, seed=self.seed, purpose="label-dropout")
        return (torch.where(draws[:, 0] < self.dropout, self.null_row, rows),)

    def for_features(self, samples: Tensor) -> Known:
        """Return the null label's row for each sample."""
        return (self.rows(None, len(samples), samples.device),)

    def given(self, values: Mapping[str, Tensor], count: int, device: torch.device) -> Known:
        """Return the rows of `labels` int64 `[b]`, by default of the null label."""
        super().given(values, count, device)
        return (self.rows(values.get("labels"), count, device),)

    def rows(self, labels: Tensor | None, count: int, device: torch.device) -> Tensor:
        """Return rows int64 `[b]` of classes; -1 or None: no class. UserError if out of range."""
        if labels is None and self.has_null_label:
            return torch.full((count,), self.null_row, device=device)
        labels = torch.full((count,), -1) if labels is None else labels
        # Reading the extremes synchronizes with the device. Training does not call this: it checks
        # its shards once.
        lowest = -1 if self.has_null_label else 0
        if int(labels.min()) < lowest or int(labels.max()) >= self.num_classes:
            null = " or -1 for no class" if lowest else ", without a null label"
            raise UserError(f"labels must be in 0..{self.num_classes - 1}{null}")
        return self._rows(labels.to(device))

    def _rows(self, labels: Tensor) -> Tensor:
        return torch.where(labels < 0, self.null_row, labels)

    def null(self, known: Known) -> Known:
        """Return the null label's row for each image."""
        if not self.has_null_label:
            raise UserError(
                f"guidance needs a model that was trained with {self.key('dropout')}; this one has"
                " no prediction without a class"
            )
        rows, *others = known
        return torch.full_like(rows, self.null_row), *others

    def balanced(self, numbers: Tensor) -> Mapping[str, Tensor]:
        """Cycle through the classes."""
        return {"labels": numbers % self.num_classes}

    def defaults(self, num_images: int, examples: Batch | None) -> Mapping[str, Tensor]:
        """Return the classes of the examples, or evenly distributed ones in ascending order."""
        if examples is not None:
            return {"labels": examples.labels}
        return {"labels": torch.arange(num_images) * self.num_classes // num_images}

    def check(self, manifest: Manifest, tokens: Tokens, name: str) -> Iterator[str]:
        """Also check that there are labels, and that the table has a row for each class."""
        yield from super().check(manifest, tokens, name)
        wanted, given = self.num_classes, len(manifest.class_names)
        if given > wanted:
            yield f"has {given} classes; {self.key('num_classes')} is {wanted}: set it to {given}"
        if not given:
            text = f"has no labels, and {self.key('num_classes')} is {wanted}; give labelled shards"
            word = self.key("num_classes").removesuffix(".num_classes")
            is_word = word.endswith(".condition")
            yield f"{text}, or {f'set {word} to null' if is_word else 'train without classes'}"


class PooledFeatures(Condition):
    """The mean of a frozen tokenizer's features, before quantization, over an image."""

    names = ("image",)
    roles: tuple[Role, ...] = ("front",)
    given_text = "features of the image"

    def __init__(self, image_size: int, *, size: int, tokenizer: str, key: Key = OWN) -> None:
        self.image_size, self.size, self.run_folder = image_size, size, tokenizer
        self.key = key

    @property
    def identity(self) -> str:
        """SHA-256 of the tokenizer."""
        return self.tokenizer.identity()

    @property
    def frozen_encoder(self) -> FrozenEncoder:
        """The tokenizer whose features are the condition."""
        return FrozenEncoder(self.run_folder, self.key("tokenizer"), self.image_size, "features")

    def part(self, role: Role, core: Core) -> nn.Module | None:
        """Build the map from features to the first token."""
        return ReplicatedLinear(self.size, core.megatron.hidden_size) if role == "front" else None

    def training(self, batch: Batch) -> Known:
        """Return the features of a batch's images."""
        return self.for_features(batch.inputs)

    def for_features(self, samples: Tensor) -> Known:
        """Return features float32 `[b, e]` of uint8 `[b, H, W, 3]`; raise UserError for others."""
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
        """The frozen tokenizer; raise UserError if it does not fit the image or feature size."""
        with blame(self.key("tokenizer")):
            opened = open_ids_tokenizer(self.run_folder)
            # Called only to raise if the image does not fit.
            opened.num_tokens(self.image_size)
            if opened.feature_size != self.size:
                raise UserError(
                    f"{self.run_folder} has features of {opened.feature_size} channels;"
                    f" {self.key('feature_size')} is {self.size}"
                )
        return opened
