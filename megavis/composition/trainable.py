"""Interface between a model and the engine, the training loop and its callbacks.

A paper with Transformer blocks is an `Objective` (`objective.py`), which fills in most of this; a
tokenizer in training, which has none, is a `Trainable` of its own.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from megavis.config.errors import UserError
from megavis.config.finetune_checks import NO_NULL_LABEL
from megavis.config.schema import ObjectiveConfig, RunConfig
from megavis.data.format.manifest import Manifest
from megavis.data.loading.batch import Batch
from megavis.model.stack import LayerPlan
from megavis.parallel.context import ParallelContext

if TYPE_CHECKING:
    from megavis.composition.classification import Classification
    from megavis.composition.composition import Composition
    from megavis.composition.places import Places


@dataclass(frozen=True)
class SequenceBatch:
    """An image as the model sees it.

    Attributes:
        inputs: what the first layer takes; every tensor has the batch as its first dimension.
        targets: what the loss takes besides the head's output, likewise.
    """

    inputs: tuple[Tensor, ...]
    targets: tuple[Tensor, ...]


@dataclass(frozen=True)
class Likelihood:
    """How a loss is read as the likelihood of what the model predicts.

    Attributes:
        dimension: what one dimension is, in words: `token of the 512-colour palette`.
        per_image: dimensions of an image.
        per_loss: dimensions whose nats the loss adds up; it is a mean over all else.
        given: what the model is conditioned on, in words; None: nothing.
    """

    dimension: str
    per_image: int
    per_loss: int = 1
    given: str | None = None


class Backbone(ABC):
    """What takes inputs in, and what is read off it, whatever is trained on top.

    Attributes:
        config: the run's.
    """

    config: RunConfig

    @property
    @abstractmethod
    def num_tokens(self) -> int:
        """Places of the sequence."""

    @abstractmethod
    def blank_batch(self, num_images: int, device: torch.device) -> Batch:
        """Return a batch of zeros in the form of the shards."""

    @property
    def tokenizer_identity(self) -> str | None:
        """SHA-256 of the network that makes tokens of images as they are read; None for none.

        Raises:
            UserError: it cannot be opened, or does not fit the config.
        """
        return None

    @property
    def needs_labels(self) -> bool:
        """True where every sample must have a class."""
        return self.config.objective.missing_null_label is not None

    def check_unlabelled(self) -> None:
        """Check that the model can be run on samples without their class.

        Raises:
            UserError: there is no input for "no class"; names the key that would give one.
        """
        key = self.config.objective.missing_null_label
        if key is not None:
            raise UserError(f"{key} {NO_NULL_LABEL}")

    @property
    def has_random_features(self) -> bool:
        """True where inputs for features hold random draws of each sample, as BERT's masks."""
        return False

    @property
    def carries_gradient(self) -> bool:
        """True where a tensor other than the hidden states has a gradient that travels back."""
        return False

    def composition(self) -> Composition:
        """Return the paper whose Transformer blocks these are.

        Raises:
            UserError: it has none.
        """
        raise UserError(f"runs of {self.config.objective.name} have no Transformer blocks")

    def feature_inputs(self, batch: Batch) -> tuple[Tensor, ...]:
        """Return `SequenceBatch.inputs` for features of the blocks, without the label.

        Raises:
            UserError: there are no blocks, or the model has no input for "no class".
        """
        name = self.config.objective.name
        raise UserError(f"{name} has no Transformer blocks whose features could be read")


class Trainable(ABC):
    """A list of layers, what goes in, and how what comes out is scored."""

    config_type: ClassVar[type[ObjectiveConfig]]

    def __init__(self, config: RunConfig, context: ParallelContext) -> None:
        self.config, self.context = config, context

    @property
    @abstractmethod
    def backbone(self) -> Backbone:
        """What takes the inputs in: this itself, or what an operator has put something on."""

    @abstractmethod
    def flops_per_image(self) -> float:
        """Return the floating-point operations of a training step for one image."""

    @abstractmethod
    def check_data(self, manifest: Manifest) -> Iterator[str]:
        """Yield what is wrong with shards of this kind for this config, a sentence each."""

    @abstractmethod
    def layer_plans(self) -> list[LayerPlan]:
        """Return the model, first layer first."""

    @abstractmethod
    def sequence(self, batch: Batch) -> SequenceBatch:
        """Turn a batch into a sequence; random draws depend on seed and sample alone."""

    def training_sequence(self, batch: Batch) -> SequenceBatch:
        """Turn a batch into the sequence that is trained on; that of evaluation by default."""
        return self.sequence(batch)

    def blank_sequence(self, num_images: int, device: torch.device) -> SequenceBatch:
        """Return such a batch's training sequence: `megavis plan` counts what it takes.

        On the meta device, too, where tensors have shapes and no numbers.
        """
        return self.training_sequence(self.backbone.blank_batch(num_images, device))

    @abstractmethod
    def loss(self, predictions: Any, targets: tuple[Tensor, ...]) -> Tensor:
        """Score the last layer's output; a float32 scalar, the mean over the images."""

    @abstractmethod
    def outputs(self, predictions: Any) -> Tensor:
        """Turn the last layer's output into the paper's own form, whole and batch first."""

    @abstractmethod
    def inputs_from(
        self, inputs: Any, *, sample_index: Tensor | None = None, **options: Any
    ) -> tuple[Tensor, ...]:
        """Return `SequenceBatch.inputs` for a user's own inputs in the paper's form.

        Args:
            inputs: as shards hold them (`Batch.inputs`), or tokens.
            sample_index: int64 `[b]`, the samples whose draws these are.
            **options: of the paper, by name.

        Raises:
            UserError: an option does not apply, or something does not fit.
        """

    def check_options(self, given: Iterable[str], known: tuple[str, ...] = ()) -> None:
        """Raise UserError for options of `inputs_from` that are none of those known."""
        for name in given:
            if name not in known:
                raise UserError(
                    f"inputs of {self.config.objective.name} take no {name}; they take"
                    f" {', '.join(('sample_index', *known))}"
                )

    @property
    def likelihood(self) -> Likelihood | None:
        """How the loss of evaluation is read as -log p of whole images; None where it is not."""
        return None

    def generation(self) -> Composition:
        """Return this paper as what its images are generated by.

        Raises:
            UserError: models of this config generate no images.
        """
        raise UserError(f"runs of {self.config.objective.name} generate no images")

    def classification(self) -> Classification | None:
        """Return this as a network that names classes, which a fine-tuning run trains."""
        return None

    def places(self) -> Places:
        """Return the words of a model that names the place of every patch.

        Raises:
            UserError: it does not.
        """
        name = self.config.objective.name
        raise UserError(f"{name} does not name the places of patches")

    @property
    def reconstructs(self) -> bool:
        """True where images go in and the same images come out, as of a tokenizer in training."""
        return False

    def shown(self, inputs: Tensor) -> Tensor:
        """Return what is reconstructed of `Batch.inputs`, as pictures uint8 `[b, H, W, 3]`."""
        return inputs

    def reconstruction(self, predictions: Any) -> Tensor:
        """Return the images that came out, uint8 `[b, H, W, 3]`, where the model reconstructs.

        Raises:
            UserError: it does not.
        """
        name = self.config.objective.name
        raise UserError(f"runs of {name} do not reconstruct images; those of vae and vqgan do")

    def reconstructed_maps(self, predictions: Any) -> Tensor:
        """Return the label maps that came out, uint8 `[b, H, W, 3]` as in shards.

        Raises:
            UserError: the model does not reconstruct label maps.
        """
        raise UserError(f"runs of {self.config.objective.name} do not reconstruct label maps")

    def measures(self, predictions: Any, targets: tuple[Tensor, ...]) -> Mapping[str, Tensor]:
        """Return other numbers of a batch, means over its images, that validation records."""
        return {}
