"""A paper as a model: its training rows, loss, features and generation.

All of it is derived from the words of its grammar; the layers are in `layers.py`.

Legend: b images, n positions of the sequence, q predicted positions, r rows of generation.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor, nn

from megavis.composition.asking import AskedRows
from megavis.composition.condition import Known
from megavis.composition.layers import Layers
from megavis.composition.reader import Reader
from megavis.composition.trainable import SequenceBatch, SumAndCount, Trainable
from megavis.config.errors import UserError
from megavis.data.format.manifest import Manifest
from megavis.data.loading.loader import Batch
from megavis.model.core import MEMORY
from megavis.model.layer_state import LayerState, PackedState
from megavis.model.stack import stacks_of
from megavis.schedules.orders import gather_tokens, to_raster
from megavis.schedules.schedule import Arrangement, PredictionTargets
from megavis.tokenizers.network_tokenizer import FrozenEncoder
from megavis.tokenizers.patches import to_grid

RunOnce = Callable[[Callable[[nn.Module], PackedState]], PackedState]


class Model(Layers):
    """A paper with Transformer blocks."""

    def outputs(self, predictions: Any) -> Tensor:
        """Return the head's output gathered and batch first; see `Density.outputs`."""
        return self.density.outputs(predictions)

    @property
    def measures_accuracy(self) -> bool:
        """True if the density has an accuracy."""
        return self.density.measures_accuracy

    def measures(self, predictions: Any, targets: tuple[Tensor, ...]) -> Mapping[str, SumAndCount]:
        """Return the density's metrics of a batch, for validation."""
        return self.density.measures(predictions, targets)

    def token_losses(self, predictions: Any, targets: tuple[Tensor, ...]) -> Tensor:
        """Return the loss of each position, `[b, n]`; raise UserError unless sequential."""
        if not self.schedule.is_sequential:
            name = self.config.objective.name
            raise UserError(f"{name} does not predict the patches of an order one by one")
        return self.density.per_token_loss(predictions, targets[0] if targets else None)

    def with_samples(self, sequence: SequenceBatch, batch: Batch) -> SequenceBatch:
        """Append the sample indices to the inputs, as the first layer expects in training."""
        if not self.config.drop_path:
            return sequence
        return replace(sequence, inputs=(*sequence.inputs, batch.sample_index))

    @property
    def num_copies(self) -> int:
        """Number of samples per column in image grids of a run."""
        return 3 if self.condition.reads_images or self.grammar.density.is_noisy else 1

    @property
    def default_share(self) -> float:
        """Share of each image that is given in image grids of a run."""
        can_be_whole = self.condition.reads_images or self.reads.is_random
        gives_none = can_be_whole and not self.schedule.needs_given
        return 0.0 if gives_none else self.schedule.given_share

    @property
    def has_random_sequence(self) -> bool:
        """True if tokens or training arrangements are drawn."""
        return self.reads.is_random or self.schedule.is_random

    @property
    def has_random_features(self) -> bool:
        """True if tokens or arrangements for features are drawn."""
        return self.reads.is_random or self.schedule.has_random_features

    @property
    def keeps_keys(self) -> bool:
        """True if, in every stack, a token's keys and values do not depend on later tokens."""
        return self.asks.keeps_keys and all(
            stack.core.visibility_kind == "causal" for stack in stacks_of(self.upper_layers())
        )

    @property
    def num_cached(self) -> int:
        """Largest number of rows in a KV cache."""
        return self.grammar.rows(self.num_tokens).blocks

    @property
    def tokenizer_identity(self) -> str | None:
        """SHA-256 of the frozen tokenizer, or of those of several; None without one."""
        parts = (self.predicts, self.reads, self.condition)
        found = list(dict.fromkeys(one for part in parts if (one := part.identity) is not None))
        if len(found) > 1:
            return hashlib.sha256("".join(found).encode()).hexdigest()
        return found[0] if found else None

    @property
    def frozen_encoders(self) -> tuple[FrozenEncoder, ...]:
        """Tokenizers that encode the images of every micro-batch, each once."""
        parts = (self.reads, self.predicts, self.condition)
        found = (part.frozen_encoder for part in parts)
        return tuple(dict.fromkeys(each for each in found if each is not None))

    def check_data(self, manifest: Manifest) -> Iterator[str]:
        """Check that the shards fit the tokens and the condition."""
        yield from self.condition.check(manifest, self.reads, self.config.objective.name)
        # Shards of ids hold no images to make other tokens of.
        if self.predicts is not self.reads and manifest.kind == "ids":
            yield f"holds ids; {self.paper.key('predicts')} is made of images: name jpeg shards"

    def classes_of(self, manifest: Manifest) -> tuple[str, ...]:
        """Return the images' classes if the model is conditioned on them, else the maps'."""
        if "labels" in self.condition.names:
            return manifest.class_names
        return super().classes_of(manifest)

    def blank_batch(self, num_images: int, device: torch.device) -> Batch:
        """Return samples of zeros."""
        if self.condition.reads_images:
            return super().blank_batch(num_images, device)
        return self.reads.blank_batch(num_images, device)

    def sequence(self, batch: Batch) -> SequenceBatch:
        """Draw tokens, arrangement and condition; return the sequence for evaluation."""
        return self._sequence(batch, self._expected_count)

    def training_sequence(self, batch: Batch) -> SequenceBatch:
        """Return the sequence of a micro-batch, with sample indices if there is drop path."""
        return self.with_samples(self._sequence(batch, self._count_of_step), batch)

    def _sequence(self, batch: Batch, count: Callable[[Tensor], Tensor]) -> SequenceBatch:
        index, samples = batch.sample_index, self.condition.predicted(batch.inputs)
        # Schedules that change during training are functions of the step as well as the seed.
        read, arrangement = self._read(samples, index), self.schedule.at(batch.step).draw(index)
        targets: tuple[Tensor, ...] = ()
        extra: tuple[Tensor, ...] = ()
        if not self.has_transform:  # A transform's output is scored instead.
            asked = self._asked(samples, read, arrangement, index)
            scored, extra = self.density.corrupted(asked, index)
            targets = (scored,)
        rows = self.numbered(self.training_rows(read, arrangement))
        inputs = (*rows, *self.condition.training(batch), *extra)
        weights = self._weights(arrangement, len(read))
        if weights and self.schedule.loss_average == "batch":
            weights = (*weights, count(index))
        return SequenceBatch(inputs, (*targets, *weights))

    def _count_of_step(self, index: Tensor) -> Tensor:
        """Return the mean number of predicted tokens per image over the whole step, `[b]`.

        Draws are functions of seed and sample, and a step is a range of samples, so each process
        counts the masks of the whole step without communication. Averaging over micro-batches and
        processes then gives the sum over the step divided by its count.
        """
        size = self.config.training.batch_size
        first = index[:1] // size * size
        step = first + torch.arange(size, device=index.device)
        return self.schedule.num_predicted(step).mean().expand(len(index))

    def _expected_count(self, index: Tensor) -> Tensor:
        # Outside training, images belong to no step, and the loss must not depend on the batch.
        return torch.full((len(index),), self.schedule.expected_predicted, device=index.device)

    def _read(self, samples: Any, index: Tensor | None) -> Tensor:
        """Return tokens in raster order, or on their grid for a transform."""
        read = self.reads.of(samples, index)
        return read if self.has_transform else self.reads.sequence(read)

    @property
    def option_names(self) -> tuple[str, ...]:
        """Options of `inputs_from`: the choices of schedule, density and condition."""
        names = (*self.schedule.names, *self.density.names, *self.condition.names)
        # A transform takes the whole grid in raster order.
        return tuple(name for name in names if not (self.has_transform and name == "order"))

    def inputs_from(
        self, inputs: Any, *, sample_index: Tensor | None = None, **options: Any
    ) -> tuple[Tensor, ...]:
        """Return `SequenceBatch.inputs` for a user's own data.

        Args:
            inputs: samples in the form of the shards (`Batch.inputs`), or tokens; tokens bypass a
                transform.
            sample_index: int64 `[b]`, the samples that determine random draws. By default draws are
                avoided where possible: latents are their mean, and only tokens that features hide
                are hidden. Orders, groups and noise are then drawn for samples 0 to b - 1.
            **options: those in `option_names`; None means absent. `order`: int64 `[b or 1, n]`,
                indices of tokens in raster order. `prefix`: number of given tokens, where that is
                drawn for each image. `boundaries`: ends of groups. `mask`: bool `[b, n]` in raster
                order, true where a token is hidden. `mask_ratio`: share of tokens outside the
                context. `gamma`: noise level, a scalar or `[b, n, 1]` in the given order.
                `labels`: int64 `[b]`, -1 for no class. `image`: the image to condition on, by
                default the inputs'.

        Raises:
            UserError: an option does not apply, or a value does not fit.
        """
        self.check_options(options, self.option_names)
        choices = {name: value for name, value in options.items() if value is not None}
        samples = self.condition.predicted(inputs)
        drawn = None if sample_index is None else sample_index.to(samples.device)
        read = self._read(samples, drawn)
        self.reads.check_values(read)
        index = torch.arange(len(read), device=read.device) if drawn is None else drawn
        arrangement = self.schedule.chosen(index, choices, is_named=sample_index is not None)
        conditions = {name: choices[name] for name in self.condition.names if name in choices}
        for name, value in conditions.items():
            if len(value) not in (1, len(read)):
                text = f"{name} has {len(value)} rows for {len(read)} inputs: give one for each"
                raise UserError(text)
        conditions = {**self.condition.from_samples(inputs), **conditions}
        known = self.condition.given(conditions, len(read), read.device)
        extra: tuple[Tensor, ...] = ()
        if self.extra_tensors:
            asked = self._asked(samples, read, arrangement, index)
            extra = self.density.corrupted(asked, index, choices)[1]
        return (*self.numbered(self.training_rows(read, arrangement)), *known, *extra)

    def _asked(self, samples: Any, read: Tensor, arrangement: Arrangement, index: Tensor) -> Tensor:
        """Return the predicted tokens, made from the samples unless they are the tokens read."""
        is_read = self.predicts is self.reads
        tokens = read if is_read else self.predicts.of(samples, index)
        asked = self._at(self.predicts.sequence(tokens), arrangement, arrangement.first_asked)
        if not arrangement.num_idle:
            return asked
        # Idle rows have blank targets, which have no weight.
        return torch.cat([asked, torch.zeros_like(asked[:, : arrangement.num_idle])], dim=1)

    def training_rows(self, read: Tensor, arrangement: Arrangement) -> AskedRows:
        """Return the rows that predict all asked positions of an arrangement.

        Args:
            read: tokens in raster order, or on their grid for a transform.
        """
        ask = partial(self.asks.rows, wanted=arrangement.prediction_targets)
        return self._rows(read, arrangement, arrangement.num_content, ask)

    def numbered(self, rows: AskedRows, since: int = 0) -> tuple[Tensor, ...]:
        """Append the numbers of the rows, int64 `[b, m]`, if vectors of the rows modulate them.

        `since`: number of rows in the KV cache.
        """
        if not self.num_row_vectors:
            return rows
        count, num_rows = self.asks.shape_of(rows)
        numbers = torch.arange(since, since + num_rows, device=rows[0].device)
        return (*rows, numbers.expand(count, -1))

    def _rows(
        self,
        read: Tensor,
        arrangement: Arrangement,
        stop: int | None,
        ask: Callable[[Tensor], AskedRows],
    ) -> AskedRows:
        """Apply `ask` to the tokens before `stop`; a transform gets all tokens on their grid."""
        tokens = self.reads.sequence(read)
        if not self.has_transform or read.ndim == 3:
            return ask(self._at(tokens, arrangement, 0, stop))
        grid = to_grid(tokens, height=self.reads.grid[0]).contiguous()
        # The first layer cuts the rows itself, after the transform; here only their places are
        # needed.
        return grid, *ask(tokens[:, :0])[1:]

    def _at(
        self, tokens: Tensor, arrangement: Arrangement, start: int, stop: int | None = None
    ) -> Tensor:
        """Return the tokens at positions [start, stop), given tokens in raster order."""
        if not self.asks.permutes:
            return tokens
        return gather_tokens(tokens, arrangement.order[:, start:stop])

    def _weights(self, arrangement: Arrangement, count: int) -> tuple[Tensor, ...]:
        """Return loss weights of the asked positions, `[b, q]`, or nothing if all are 1."""
        if arrangement.predicts_all:
            return ()
        weights = arrangement.is_predicted.float().expand(count, -1)
        return (weights if self.asks.permutes else to_raster(weights, arrangement.order),)

    def feature_inputs(self, batch: Batch) -> tuple[Tensor, ...]:
        """Return `SequenceBatch.inputs` for features of a batch, ignoring its labels.

        Raises:
            UserError: the model has no input for "no class".
        """
        self.check_unlabelled()
        index = batch.sample_index if self.has_random_features else None
        return self.inputs_for_features(batch.inputs, index)

    def inputs_for_features(
        self, inputs: Tensor, sample_index: Tensor | None
    ) -> tuple[Tensor, ...]:
        """Return `SequenceBatch.inputs` for features of samples, hiding no more than needed.

        All tokens of this sequence enter the mean over tokens. Labels are not an argument, since
        features must not contain the answer of a probe. `sample_index`, int64 `[b]`, determines
        random draws; None unless `has_random_features`.
        """
        read = self._read(self.condition.predicted(inputs), sample_index)
        return self.inputs_from_tokens(read, self.condition.for_features(inputs), sample_index)

    def inputs_from_tokens(
        self, read: Tensor, known: Known, sample_index: Tensor | None = None
    ) -> tuple[Tensor, ...]:
        """Return `SequenceBatch.inputs` for features of tokens; see `inputs_for_features`.

        Args:
            read: as in `training_rows`.
            known: conditions for features.
        """
        index = sample_index
        if index is None:
            index = torch.zeros(len(read), dtype=torch.int64, device=read.device)
        arrangement = self.schedule.for_features(index.to(read.device))
        ask = partial(self.asks.feature_rows, arrangement=arrangement)
        rows = self._rows(read, arrangement, None, ask)
        return (*self.numbered(rows), *known, *self._blank_inputs(rows))

    def _blank_inputs(self, rows: AskedRows) -> tuple[Tensor, ...]:
        count, num_rows = self.asks.shape_of(rows)
        return self.density.blank_inputs((count, num_rows - self.num_skipped), rows[0].device)

    def loss(self, predictions: Any, targets: tuple[Tensor, ...]) -> Tensor:
        """Return the loss per predicted token, a mean over the images.

        Args:
            targets: tokens `[b, q, ...]`, absent with a transform; then weights `[b, q]`, absent
                if all are predicted; then the divisor of each image's sum, float32 `[b]`, by
                default its number of predicted tokens.
        """
        # A transform is trained through its tokens, which the head returns with the predictions.
        scored = None if self.has_transform else targets[0]
        weights = targets[not self.has_transform :]
        losses = self.density.per_token_loss(predictions, scored)
        if not weights:
            return losses.mean()
        counted, *counts = weights
        # BERT's masks may hide no token of an image.
        count = counts[0] if counts else counted.sum(1).clamp(min=1.0)
        return ((losses * counted).sum(1) / count).mean()

    def held_out_loss(
        self, predictions: Any, targets: tuple[Tensor, ...], num_images: int
    ) -> SumAndCount:
        """Return the loss as a sum over images; over predicted tokens if all weigh the same."""
        loss = self.loss(predictions, targets)
        weights = targets[not self.has_transform :]
        if len(weights) < 2:
            return loss * num_images, num_images
        counted, divisors = weights
        return loss * divisors.sum(), counted.sum()

    def with_full_attention(self) -> Self:
        """Return a new instance of the paper with full attention in its blocks."""
        return type(self)(self.config, self.context, visibility="full")

    # Generation, for papers that generate.

    def tokens_of(self, inputs: Tensor, index: Tensor | None = None) -> Tensor:
        """Return the tokenizer's output for `Batch.inputs`, or for tokens.

        `index`, int64 `[b]`, determines the tokenizer's draws if there are any.

        Raises:
            UserError: the inputs have the wrong shape or type.
        """
        return self.reads.of(self.condition.predicted(inputs), index)

    def rows(
        self, tokens: Tensor, wanted: PredictionTargets, known: Known, since: int = 0
    ) -> tuple[Tensor, ...]:
        """Return the first layer's inputs to predict the asked positions.

        Args:
            tokens: `[r, n, ...]` in the order of generation.
            wanted: its arrangement has one row, or r.
            since: number of positions in the KV cache.
        """
        rows = self.asks.rows(tokens, wanted, since)
        return (*self.numbered(rows, since), *known, *self._blank_inputs(rows))

    def prepare(self, known: Known, run_once: RunOnce) -> Known:
        """Compute what all steps of generation share, where `run_once` is `Inference.once`."""

        def encode(start: Callable[[nn.Module], PackedState]) -> Tensor:
            state = LayerState.unpack(run_once(start), self.core.carried_names)
            return state.carried[MEMORY].transpose(0, 1)

        return self.condition.prepare(known, encode)

    def given(self, tokens: Tensor) -> Tensor:
        """Return the tokenizer's tokens as the model predicts them, `[b, n, ...]` in raster order.

        Raises:
            UserError: there is a learned transform, which mixes all tokens of an image, so that
                some of its tokens would contain information about the others.
        """
        if self.has_transform:
            raise UserError(
                f"with {self.paper.key('transform')} every token depends on the whole image, so no"
                " part of an image can be given"
            )
        return self.reads.sequence(tokens)

    def undo(self, layer: nn.Module, tokens: Tensor) -> Tensor:
        """Invert `given`, and a learned transform if there is one."""
        if self.has_transform:
            assert isinstance(layer, Reader)
            tokens = layer.untransformed(tokens, self.reads.grid[0])
        return self.reads.from_sequence(tokens)

    def check_images(self, folder: Path) -> None:
        """Raise UserError if tokens cannot be decoded to images."""
        self.reads.check_images(folder)

    def to_images(self, tokens: Tensor, folder: Path) -> Tensor:
        """Decode the output of `undo` to uint8 `[b, H, W, 3]`, or raise UserError."""
        return self.reads.to_images(tokens, folder)


def model_of(objective: Trainable) -> Model:
    """Return the model that an objective trains, with or without a classifier on top.

    Raises:
        UserError: it has no Transformer blocks.
    """
    if not isinstance(objective.backbone, Model):
        raise UserError(f"runs of {objective.config.objective.name} have no Transformer blocks")
    return objective.backbone


def generator_of(objective: Trainable) -> Model:
    """Return the model that generates images; raise UserError if models of the config cannot."""
    if objective.backbone is not objective:
        raise UserError(
            "a fine-tuned run classifies and generates no images; sample from the run that it"
            " started from"
        )
    reason = objective.config.objective.cannot_generate(objective.config)
    if reason is not None:
        raise UserError(reason)
    return model_of(objective)
