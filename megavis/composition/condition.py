"""Conditions of a model: none, the class of an image, or an encoder's output for another image.

Legend: b images.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from megavis.composition.reader import Role, Rows
from megavis.composition.tokens import Tokens
from megavis.config.errors import UserError
from megavis.data.format.manifest import Manifest
from megavis.data.loading.batch import Batch
from megavis.model.core import Core
from megavis.model.init import filled, normal
from megavis.model.layer_state import PackedState
from megavis.model.stack import LayerPlan
from megavis.parallel.random import uniform

Known = tuple[Tensor, ...]
"""What a model knows of each image besides its tokens; batch first."""

Encode = Callable[[Callable[[nn.Module], PackedState]], Tensor]
"""Runs an encoder on what a job makes of the first layer: to the memory `[b, c, h]`, everywhere."""


class Condition:
    """Nothing, unless a subclass says otherwise."""

    names: tuple[str, ...] = ()
    """Conditions that can be given: `labels`, `image`."""
    roles: tuple[Role, ...] = ()
    """Parts of the first layer that take them, in the order of `Known`."""
    reads_images: bool = False
    """True where samples must be images, whatever tokens are made of them."""

    @property
    def num_memory(self) -> int:
        """Tokens of an encoder to which the blocks attend."""
        return 0

    def layers(self, core: Core, *, num_rows: int, seed: int) -> list[LayerPlan]:
        """Return the layers above the first one that encode a condition, where there are any.

        Args:
            core: of the blocks that attend to it.
            num_rows: tokens of an image in these.
            seed: of the run.
        """
        return []

    def check(self, manifest: Manifest, tokens: Tokens, name: str) -> Iterator[str]:
        """Yield what is wrong with shards for a paper of this name that reads these tokens."""
        yield from tokens.check(manifest, name)

    @property
    def identity(self) -> str | None:
        """SHA-256 of the frozen network that describes images; None where none does."""
        return None

    def part(self, role: Role, core: Core) -> nn.Module | nn.Parameter | None:
        """Build the part of the first layer with this role; None where the condition has none."""
        return None

    def predicted(self, samples: Any) -> Any:
        """Return what tokens are made of, of samples as shards hold them: all of it."""
        return samples

    def training(self, batch: Batch) -> Known:
        """Return what training shows of a batch; random draws depend on seed and sample alone."""
        return ()

    def for_features(self, samples: Tensor) -> Known:
        """Return what features of samples, as shards hold them, may know: never the class."""
        return ()

    def given(self, values: Mapping[str, Tensor], count: int, device: torch.device) -> Known:
        """Return what the model takes for conditions of `count` images.

        Raises:
            UserError: a value is out of range, missing, or no condition of this model.
        """
        for name in values:
            if name not in self.names:
                raise UserError(f"this model is not conditioned on {name}")
        return ()

    def found_in(self, samples: Tensor) -> Mapping[str, Tensor]:
        """Return the conditions that samples hold themselves, by name."""
        return {}

    def nothing(self, known: Known) -> Known:
        """Return the null condition, in the form of `known`.

        Raises:
            UserError: the model was not trained without its condition.
        """
        raise UserError(
            "guidance needs a model that was trained with objective.label_dropout; this one has no"
            " prediction without a class"
        )

    def prepare(self, known: Known, encode: Encode) -> Known:
        """Compute once what all steps of generation need."""
        return known

    def usual(self, num_images: int, examples: Batch | None) -> Mapping[str, Tensor]:
        """Return the conditions of a picture of so many images.

        Args:
            num_images: b.
            examples: what is completed, or what the model reads, where it does.

        Raises:
            UserError: examples are needed and there are none.
        """
        return {}

    def balanced(self, numbers: Tensor) -> Mapping[str, Tensor]:
        """Return conditions of images int64 `[b]` that are drawn from nothing, in equal shares.

        Raises:
            UserError: images are drawn from something alone.
        """
        return {}

    def shown(self, examples: Batch) -> list[Tensor]:
        """Return images uint8 `[b, H, W, 3]` that precede what is drawn from them."""
        return []


class LearnedTokens(Condition):
    """Nothing of an image: learned vectors, the same in front of all, such as class tokens."""

    def __init__(self, count: int) -> None:
        """Build for so many."""
        self.count = count

    def part(self, role: Role, core: Core) -> nn.Module | nn.Parameter | None:
        """Build the vectors `[count, h]`."""
        if role != "front":
            return None
        return filled(self.count, core.model.hidden_size, fill=normal(0.02))


class Labels(Condition):
    """The class of an image: a row of a table, the last of which may be the null class."""

    names: tuple[str, ...] = ("labels",)
    roles: tuple[Role, ...] = ("start",)

    def __init__(
        self,
        num_classes: int,
        *,
        dropout: float,
        seed: int,
        num_special_rows: int = 0,
        deviation: float = 1.0,
        classes_key: str = "objective.num_classes",
    ) -> None:
        """Build.

        Args:
            num_classes: 0 where there are none.
            dropout: probability that training shows the null label; 0: there is none.
            seed: with the sample decides that.
            num_special_rows: rows of the table between the classes and the null label.
            deviation: of the table at the start.
            classes_key: of the config, that says `num_classes`.
        """
        self.num_classes, self.dropout, self.seed = num_classes, dropout, seed
        self.deviation, self.classes_key = deviation, classes_key
        self.has_null_label = num_classes > 0 and dropout > 0
        # Without classes all images share one row.
        self.num_rows = (num_classes or 1) + num_special_rows + int(self.has_null_label)
        self.null_row = self.num_rows - 1 if num_classes else 0

    def part(self, role: Role, core: Core) -> nn.Module | nn.Parameter | None:
        """Build the table."""
        if role != self.roles[0]:
            return None
        return Rows(self.num_rows, core.megatron.hidden_size, normal(self.deviation))

    def training(self, batch: Batch) -> Known:
        """Return rows int64 `[b]` of the labels, some dropped; of no label the null label's."""
        if not self.num_classes:
            return (torch.zeros_like(batch.labels),)
        rows = self._rows(batch.labels)
        if not self.has_null_label:
            return (rows,)
        draws = uniform(batch.sample_index, 1, seed=self.seed, purpose="label-dropout")
        return (torch.where(draws[:, 0] < self.dropout, self.null_row, rows),)

    def for_features(self, samples: Tensor) -> Known:
        """Return the null label's row for each sample."""
        return (self.rows(None, len(samples), samples.device),)

    def given(self, values: Mapping[str, Tensor], count: int, device: torch.device) -> Known:
        """Return the rows of the labels int64 `[b]`; of the null label where none are named."""
        super().given(values, count, device)
        return (self.rows(values.get("labels"), count, device),)

    def rows(self, labels: Tensor | None, count: int, device: torch.device) -> Tensor:
        """Return the table's rows int64 `[b]` of classes `[b]`; -1 and None: no class.

        Raises:
            UserError: a label is out of range, or none is given to a model that needs one.
        """
        if labels is None and (self.has_null_label or not self.num_classes):
            return torch.full((count,), self.null_row, device=device)
        if not self.num_classes:
            return torch.zeros(count, dtype=torch.int64, device=device)
        labels = torch.full((count,), -1) if labels is None else labels
        lowest = -1 if self.has_null_label else 0
        if int(labels.min()) < lowest or int(labels.max()) >= self.num_classes:
            null = " or -1 for no class" if lowest else ", without a null label"
            raise UserError(f"labels must lie in 0..{self.num_classes - 1}{null}")
        return self._rows(labels.to(device))

    def _rows(self, labels: Tensor) -> Tensor:
        return torch.where(labels < 0, self.null_row, labels)

    def nothing(self, known: Known) -> Known:
        """Return the null label's row for each image."""
        if not self.has_null_label:
            return super().nothing(known)
        rows, *others = known
        return torch.full_like(rows, self.null_row), *others

    def balanced(self, numbers: Tensor) -> Mapping[str, Tensor]:
        """Return classes that take turns."""
        return {"labels": numbers % self.num_classes} if self.num_classes else {}

    def usual(self, num_images: int, examples: Batch | None) -> Mapping[str, Tensor]:
        """Return the classes of examples, or evenly spread ones, equals together."""
        if not self.num_classes:
            return {}
        if examples is not None:
            return {"labels": examples.labels}
        return {"labels": torch.arange(num_images) * self.num_classes // num_images}

    def check(self, manifest: Manifest, tokens: Tokens, name: str) -> Iterator[str]:
        """Check labels too, and that the table has a row for each class."""
        yield from super().check(manifest, tokens, name)
        wanted, given = self.num_classes, len(manifest.class_names)
        if given > wanted > 0:
            yield f"has {given} classes; {self.classes_key} is {wanted}"
        if wanted and not given:
            text = f"has no labels, and {self.classes_key} is {wanted}"
            yield f"{text}; give labelled shards, or train without classes"
