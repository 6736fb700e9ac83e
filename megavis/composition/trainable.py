"""Interface between a model and the engine, the training loop and its callbacks.

Papers with Transformer blocks are a `Model` (`model.py`); autoencoders implement it in
`autoencoder.py`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, Protocol, Self

import torch
from torch import Tensor, nn

from megavis.checkpoint.format.tensor_reader import CheckpointReader
from megavis.composition.tokens import blank_batch
from megavis.config.errors import UserError
from megavis.config.finetune_checks import NO_NULL_LABEL
from megavis.config.schema import ObjectiveConfig, RunConfig
from megavis.data.format.manifest import Manifest
from megavis.data.loading.loader import Batch
from megavis.model.stack import LayerPlan, matrix_share, model_flops
from megavis.parallel.context import ParallelContext
from megavis.tokenizers.network_tokenizer import FrozenEncoder

SumAndCount = tuple[Tensor, Tensor | int]
"""Sum and count of a metric in one batch.

Over a set, the metric is the sum of the sums divided by the sum of the counts, so that it does not
depend on how the set is divided into batches.
"""


class StartingWeights(Protocol):
    """Initial values that come from another run."""

    @property
    def checkpoint(self) -> Path:
        """Folder of a step of that run."""

    def tensor(self, reader: CheckpointReader, name: str) -> Tensor | None:
        """Return the whole initial value of a parameter; None if it is not from the other run."""


class Trainable(ABC):
    """A list of layers with their inputs and loss."""

    config_type: ClassVar[type[ObjectiveConfig]]

    def __init__(self, config: RunConfig, context: ParallelContext) -> None:
        self.config, self.context = config, context

    @property
    @abstractmethod
    def backbone(self) -> Backbone:
        """The model that takes the inputs: this one, or the one that a fine-tuning run wraps."""

    def check_features(self) -> None:  # noqa: B027 - most models have them
        """Raise UserError, with the reason, if no features of whole images can be computed."""

    def flops_per_image(self) -> float:
        """Return the FLOPs of a training step for one image, by default summed over the layers."""
        return model_flops(self.layer_plans())

    @property
    def counts_whole_step(self) -> bool:
        """Whether `flops_per_image` leaves out nothing large."""
        return True

    def fp8_share(self) -> float:
        """Return the fraction of a training step's FLOPs that run in FP8: 0 without it."""
        return matrix_share(self.layer_plans()) if self.config.training.fp8 else 0.0

    @abstractmethod
    def check_data(self, manifest: Manifest) -> Iterator[str]:
        """Yield a message for each reason why such shards do not fit this config."""

    def classes_of(self, manifest: Manifest) -> tuple[str, ...]:
        """Return the names, by label, of the classes of shards that the model reads or predicts.

        Defaults to the classes of the label maps; empty without them.
        """
        return () if manifest.target is None else manifest.target.class_names

    @abstractmethod
    def layer_plans(self) -> list[LayerPlan]:
        """Return the layers of the model, in order."""

    @abstractmethod
    def sequence(self, batch: Batch) -> SequenceBatch:
        """Turn a batch into a sequence; random draws are functions of seed and sample."""

    def training_sequence(self, batch: Batch) -> SequenceBatch:
        """Turn a batch into a sequence for training, by default the same as for evaluation."""
        return self.sequence(batch)

    def blank_batch(self, num_images: int, device: torch.device) -> Batch:
        """Return a batch of zeros in the form of the shards; by default the backbone's."""
        return self.backbone.blank_batch(num_images, device)

    def blank_sequence(self, num_images: int, device: torch.device) -> SequenceBatch:
        """Return the training sequence of a blank batch, whose size `megavis plan` counts."""
        return self.training_sequence(self.blank_batch(num_images, device))

    @abstractmethod
    def loss(self, predictions: Any, targets: tuple[Tensor, ...]) -> Tensor:
        """Return the mean loss over the images, a float32 scalar."""

    @abstractmethod
    def outputs(self, predictions: Any) -> Tensor:
        """Return the last layer's output gathered and batch first."""

    @abstractmethod
    def inputs_from(
        self, inputs: Any, *, sample_index: Tensor | None = None, **options: Any
    ) -> tuple[Tensor, ...]:
        """Return `SequenceBatch.inputs` for a user's own data, and options of the paper.

        Args:
            inputs: samples in the form of the shards (`Batch.inputs`), or tokens.
            sample_index: int64 `[b]`, the samples that determine random draws.

        Raises:
            UserError: an option does not apply, or a value does not fit.
        """

    def check_options(self, given: Iterable[str], known: tuple[str, ...] = ()) -> None:
        """Raise UserError for options of `inputs_from` that are not in `known`."""
        for name in given:
            if name not in known:
                raise UserError(
                    f"inputs of {self.config.objective.name} take no {name}; they take"
                    f" {', '.join(('sample_index', *known))}"
                )

    @property
    def likelihood(self) -> Likelihood | None:
        """How to convert the evaluation loss to -log p of images; None if there is none."""
        return None

    @property
    def pretrained_key(self) -> str | None:
        """Config key that names the run that some weights start from; None: none do."""
        return None

    def pretrained(self) -> StartingWeights | None:
        """Open the run that some weights start from, if any; raise UserError if they do not fit."""
        return None

    @property
    def frozen_encoders(self) -> tuple[FrozenEncoder, ...]:
        """Tokenizers that encode the images of every micro-batch in training, each once."""
        return ()

    @property
    def reconstructs(self) -> bool:
        """True for autoencoders."""
        return False

    def shown(self, inputs: Tensor) -> Tensor:
        """Return the part of `Batch.inputs` to reconstruct, as images uint8 `[b, H, W, 3]`."""
        return inputs

    def reconstruction(self, predictions: Any) -> Tensor:
        """Return an autoencoder's images, uint8 `[b, H, W, 3]`; raise UserError for others."""
        name = self.config.objective.name
        raise UserError(f"runs of {name} do not reconstruct images; runs of vae and vqgan do")

    def reconstructed_maps(self, predictions: Any) -> Tensor:
        """Return label maps uint8 `[b, H, W, 3]` as in shards, or raise UserError."""
        raise UserError(f"runs of {self.config.objective.name} do not reconstruct label maps")

    @property
    def takes_images_singly(self) -> bool:
        """True if the last layer runs once for each image of a micro-batch."""
        return False

    def fullest(self, build: Callable[[], nn.Module]) -> nn.Module:
        """Build the last layer so that it does the most work that any image can cause.

        `megavis plan` runs it on the meta device, where nothing depends on values.
        """
        return build()

    @property
    def measures_accuracy(self) -> bool:
        """True if `measures` has `accuracy`."""
        return False

    def measures(self, predictions: Any, targets: tuple[Tensor, ...]) -> Mapping[str, SumAndCount]:
        """Return further validation metrics of a batch as sums and counts."""
        return {}

    def held_out_loss(
        self, predictions: Any, targets: tuple[Tensor, ...], num_images: int
    ) -> SumAndCount:
        """Return the loss of a batch of held-out images as sum and count."""
        return self.loss(predictions, targets) * num_images, num_images


@dataclass(frozen=True)
class SequenceBatch:
    """Inputs and targets of a batch; every tensor has the batch as its first dimension.

    Attributes:
        targets: inputs of the loss besides the head's output.
    """

    inputs: tuple[Tensor, ...]
    targets: tuple[Tensor, ...]


@dataclass(frozen=True)
class Likelihood:
    """How to convert a loss to the likelihood of an image.

    Attributes:
        dimension: description of one dimension, such as `colour of a vocabulary of 512`.
        per_image: dimensions of an image.
        per_loss: dimensions over which the loss sums nats; it averages over everything else.
        given: description of what the model is conditioned on; None: nothing.
    """

    dimension: str
    per_image: int
    per_loss: int = 1
    given: str | None = None


class Backbone(Trainable):
    """A paper: what takes inputs and provides features, whether or not a classifier is on top."""

    paper: Any
    """The paper's section of the config, an instance of `config_type`."""

    def __init__(self, config: RunConfig, context: ParallelContext) -> None:
        super().__init__(config, context)
        assert isinstance(config.objective, self.config_type)
        self.paper = config.objective

    @property
    def backbone(self) -> Self:
        """The paper itself."""
        return self

    @property
    @abstractmethod
    def num_tokens(self) -> int:
        """Positions of the sequence."""

    def blank_batch(self, num_images: int, device: torch.device) -> Batch:
        """Return a batch of zeros in the form of the shards, by default of images."""
        side = self.config.data.image_size
        return blank_batch(num_images, (side, side, 3), torch.uint8, device)

    @property
    def tokenizer_identity(self) -> str | None:
        """SHA-256 of the frozen tokenizer that encodes images during training; None without one.

        Raises:
            UserError: it cannot be opened, or does not fit the config.
        """
        return None

    @cached_property
    def null_label_key(self) -> str | None:
        """Key that adds an input for "no class"; None if there is one. Asked for each batch."""
        return self.config.objective.null_label_key(self.config)

    @property
    def needs_labels(self) -> bool:
        """True if every sample must have a class."""
        return self.null_label_key is not None

    def check_unlabelled(self) -> None:
        """Raise UserError if the model has no input for "no class", with the key that adds one."""
        if self.null_label_key is not None:
            raise UserError(f"{self.null_label_key} {NO_NULL_LABEL}")

    @property
    def has_random_features(self) -> bool:
        """True if the inputs for features depend on random draws, such as BERT's masks."""
        return False

    @property
    def carries_gradient(self) -> bool:
        """True if tensors other than the hidden states carry a gradient between layers."""
        return False

    def feature_inputs(self, batch: Batch) -> tuple[Tensor, ...]:
        """Return `SequenceBatch.inputs` for features, without labels, or raise UserError."""
        name = self.config.objective.name
        raise UserError(f"{name} has no Transformer blocks, and so no features")
