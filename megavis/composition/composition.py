"""A paper as a composition: sequences, loss, features and generation follow from its words.

The words themselves (tokens, schedule, asking, density, condition) and the first layer, which they
make, are in `words.py`.

Legend: b images, n positions of the sequence, q predicted ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor, nn

from megavis.composition.asking import AskedRows
from megavis.composition.condition import Known
from megavis.composition.objective import SequenceBatch
from megavis.composition.places import Places
from megavis.composition.reader import Reader
from megavis.composition.tokens import blank_batch
from megavis.composition.words import Words
from megavis.config.errors import UserError
from megavis.data.format.manifest import Manifest
from megavis.data.loading.batch import Batch
from megavis.model.core import MEMORY
from megavis.model.flops import Workload
from megavis.model.layer_state import LayerState, PackedState
from megavis.model.parts import stacks_of
from megavis.model.stack import LayerPlan
from megavis.schedules.orders import take_places, to_raster
from megavis.schedules.schedule import Arrangement, Question
from megavis.tokenizers.patches import to_grid

RunOnce = Callable[[Callable[[nn.Module], PackedState]], PackedState]


class Composition(Words):
    """A paper in the words of the grammar."""

    @property
    def num_copies(self) -> int:
        """Times that each column of a picture is drawn."""
        return 3 if self.condition.reads_images else 1

    @property
    def usual_share(self) -> float:
        """Share of an image that is given in pictures of a run."""
        return 0.0 if self.condition.reads_images else 0.5

    @property
    def num_tokens(self) -> int:
        """Tokens of an image."""
        return self.predicts.num_tokens

    @property
    def has_random_sequence(self) -> bool:
        """True where tokens or arrangements are drawn."""
        return self.reads.is_random or self.schedule.is_random

    @property
    def has_random_features(self) -> bool:
        """True where tokens or arrangements of features are drawn."""
        return self.reads.is_random or self.schedule.has_random_features

    @property
    def keeps_keys(self) -> bool:
        """True where the keys and values of a token change in no stack as others follow."""
        return self.asks.keeps_keys and all(
            stack.core.visibility_kind == "causal" for stack in stacks_of(self.upper_layers())
        )

    @property
    def tokenizer_identity(self) -> str | None:
        """SHA-256 of what makes the tokens."""
        return self.predicts.identity or self.reads.identity or self.condition.identity

    def workload(self) -> Workload:
        """Return what is computed for an image of training."""
        plan, upper = self.schedule.draw(torch.zeros(1, dtype=torch.int64)), self.second_stack
        width = self.num_outputs if upper is None else upper.core.model.hidden_size
        work = self.asks.workload(plan, width)
        return replace(work, num_memory=self.condition.num_memory)

    def encoder_layers(self) -> list[LayerPlan]:
        """Return those of the condition."""
        num_rows, seed = self.workload().num_tokens, self.config.seed
        return self.condition.layers(self.core, num_rows=num_rows, seed=seed)

    def check_data(self, manifest: Manifest) -> Iterator[str]:
        """Check that the shards hold what tokens and condition come from."""
        yield from self.condition.check(manifest, self.reads, self.config.objective.name)

    def blank_batch(self, num_images: int, device: torch.device) -> Batch:
        """Return samples of zeros."""
        if not self.condition.reads_images:
            return self.reads.blank_batch(num_images, device)
        side = self.config.data.image_size
        return blank_batch(num_images, (side, side, 3), torch.uint8, device)

    def sequence(self, batch: Batch) -> SequenceBatch:
        """Draw tokens, arrangement and condition, and ask for what the arrangement predicts."""
        index, samples = batch.sample_index, self.condition.predicted(batch.inputs)
        read, plan = self._read(samples, index), self.schedule.draw(index)
        targets: tuple[Tensor, ...] = ()
        extra: tuple[Tensor, ...] = ()
        if not self.has_transform:  # which gives the tokens that are scored
            asked = self._asked(samples, read, plan, index)
            scored, extra = self.density.corrupted(asked, index)
            targets = (scored,)
        inputs = (*self.training_rows(read, plan), *self.condition.training(batch), *extra)
        return SequenceBatch(inputs, (*targets, *self._weights(plan, len(read))))

    def _read(self, samples: Any, index: Tensor | None) -> Tensor:
        """Return tokens in raster order; those for a transform as the tokenizer gives them."""
        read = self.reads.of(samples, index)
        return read if self.has_transform else self.reads.sequence(read)

    @property
    def option_names(self) -> tuple[str, ...]:
        """Options of `inputs_from`: what schedule, density and condition let be chosen."""
        names = (*self.schedule.names, *self.density.names, *self.condition.names)
        # A transform takes the whole grid as it is.
        return tuple(name for name in names if not (self.has_transform and name == "order"))

    def inputs_from(
        self, inputs: Any, *, sample_index: Tensor | None = None, **options: Any
    ) -> tuple[Tensor, ...]:
        """Return `SequenceBatch.inputs` for a user's own data.

        Args:
            inputs: as shards hold them (`Batch.inputs`), or tokens; these pass a transform by.
            sample_index: int64 `[b]`, the samples whose draws these are. Without it, what need not
                be drawn is not: latents are their mean, nothing is hidden that features need not
                hide. Orders, groups and noise are those of samples 0 to b - 1.
            **options: `option_names`; None leaves one out. `order` int64 `[b or 1, n]`, of tokens
                in raster order; `boundaries`, where groups end; `mask` bool `[b, n]` in raster
                order, true where a token is hidden; `mask_ratio`, the share that is not seen;
                `gamma`, of noise, a number or `[b, n, 1]` in the order; `labels` int64 `[b]`, -1:
                no class; `image`, what is known besides, that of the inputs when absent.

        Raises:
            UserError: an option does not apply, or something does not fit.
        """
        self.check_options(options, self.option_names)
        choices = {name: value for name, value in options.items() if value is not None}
        samples = self.condition.predicted(inputs)
        read = self._read(samples, sample_index)
        self.reads.check_values(read)
        index = torch.arange(len(read)) if sample_index is None else sample_index
        index = index.to(read.device)
        plan = self.schedule.chosen(index, choices, is_named=sample_index is not None)
        conditions = {name: choices[name] for name in self.condition.names if name in choices}
        conditions = {**self.condition.found_in(inputs), **conditions}
        known = self.condition.given(conditions, len(read), read.device)
        extra: tuple[Tensor, ...] = ()
        if self.extra_tensors:
            asked = self._asked(samples, read, plan, index)
            extra = self.density.corrupted(asked, index, choices)[1]
        return (*self.training_rows(read, plan), *known, *extra)

    def _asked(self, samples: Any, read: Tensor, plan: Arrangement, index: Tensor) -> Tensor:
        """Return the tokens that a plan asks for: those that are read, or others of the samples."""
        is_read = self.predicts is self.reads
        tokens = read if is_read else self.predicts.of(samples, index)
        return self._at(self.predicts.sequence(tokens), plan, plan.first_asked)

    def training_rows(self, read: Tensor, plan: Arrangement) -> AskedRows:
        """Return the rows that predict all that an arrangement asks for.

        Args:
            read: tokens in raster order, or as the tokenizer gives them.
            plan: the arrangement.
        """
        ask = partial(self.asks.rows, question=plan.question)
        return self._rows(read, plan, plan.num_content, ask)

    def feature_rows(self, read: Tensor, plan: Arrangement) -> AskedRows:
        """Return the rows that hold all tokens; arguments as `training_rows` has them."""
        return self._rows(read, plan, None, partial(self.asks.feature_rows, plan=plan))

    def _rows(
        self, read: Tensor, plan: Arrangement, stop: int | None, ask: Callable[[Tensor], AskedRows]
    ) -> AskedRows:
        """Ask with the tokens before `stop`; those for a transform go in on their grid."""
        tokens = self.reads.sequence(read)
        if not self.has_transform or read.ndim == 3:
            return ask(self._at(tokens, plan, 0, stop))
        grid = to_grid(tokens, height=self.reads.grid[0]).contiguous()
        return grid, *ask(tokens[:, :0])[1:]

    def _at(self, tokens: Tensor, plan: Arrangement, start: int, stop: int | None = None) -> Tensor:
        """Return the tokens at positions [start, stop) of a plan, of those in raster order."""
        if not self.asks.permutes:
            return tokens
        return take_places(tokens, plan.order[:, start:stop])

    def _weights(self, plan: Arrangement, count: int) -> tuple[Tensor, ...]:
        """Return which of the asked positions count, `[b, q]`; nothing where all do."""
        if plan.predicts_all:
            return ()
        weights = plan.is_predicted.float().expand(count, -1)
        return (weights if self.asks.permutes else to_raster(weights, plan.order),)

    def inputs_for_features(
        self, inputs: Tensor, sample_index: Tensor | None
    ) -> tuple[Tensor, ...]:
        """Return all tokens in the arrangement of features, without the class."""
        read = self._read(self.condition.predicted(inputs), sample_index)
        index = torch.zeros(len(read)).long() if sample_index is None else sample_index
        plan = self.schedule.for_features(index.to(read.device))
        rows = self.feature_rows(read, plan)
        known = self.condition.for_features(inputs)
        return (*rows, *known, *self._nothing_more(rows))

    def _nothing_more(self, rows: AskedRows) -> tuple[Tensor, ...]:
        return self.density.nothing_more(self.asks.shape_of(rows), rows[0].device)

    def loss(self, predictions: Any, targets: tuple[Tensor, ...]) -> Tensor:
        """Return the loss of a token, the mean over the predicted ones of each image.

        Args:
            predictions: as the head gives them.
            targets: tokens `[b, q, ...]`, unless a transform gives them; weights `[b, q]` where
                not all are predicted.
        """
        scored = None if self.has_transform else targets[0]
        weights = targets[not self.has_transform :]
        losses = self.density.per_token_loss(predictions, scored)
        if not weights:
            return losses.mean()
        return ((losses * weights[0]).sum(1) / weights[0].sum(1).clamp(min=1.0)).mean()

    def places(self) -> Places:
        """Return the words of a model that names places; raises UserError where it does not."""
        return Places.of(self.reads, self.schedule, self.asks, self.density) or super().places()

    def composition(self) -> Composition:
        """Return itself."""
        return self

    def seeing_all(self) -> Self:
        """Return the same paper with blocks in which all tokens see all, built anew."""
        return type(self)(self.config, self.context, visibility="full")

    # Generation, for papers that generate.

    def generation(self) -> Composition:
        """Return itself; raises UserError where models of the config generate no images."""
        if self.config.objective.no_images is not None:
            raise UserError(self.config.objective.no_images)
        return self

    def blank_tokens(self, images: Tensor) -> Tensor:
        """Return tokens `[b, n, ...]` of zeros for images `[b]`, on their device."""
        return self.reads.blank(images)

    def tokens_of(self, inputs: Tensor, index: Tensor | None = None) -> Tensor:
        """Return tokens of what shards hold, as the tokenizer gives them.

        Args:
            inputs: of `Batch`, or tokens.
            index: int64 `[b]`, of the samples; decides draws of the tokenizer, where it draws.

        Raises:
            UserError: the inputs have another form.
        """
        return self.reads.of(self.condition.predicted(inputs), index)

    def prior(self, images: Tensor, *, seed: int) -> Tensor | None:
        """Draw tokens as their tokenizer's training assumed them, if it did."""
        return self.reads.prior(images, seed=seed)

    def rows(
        self, tokens: Tensor, question: Question, known: Known, since: int = 0
    ) -> tuple[Tensor, ...]:
        """Return what the first layer takes to predict the positions that are asked for.

        Args:
            tokens: `[r, n, ...]` in the order of generation.
            question: its plan has one row, or r.
            known: the condition.
            since: positions whose keys and values are kept.
        """
        rows = self.asks.rows(tokens, question, since)
        return (*rows, *known, *self._nothing_more(rows))

    def prepare(self, known: Known, run_once: RunOnce) -> Known:
        """Compute once what all steps of generation need of a condition.

        Args:
            known: the condition.
            run_once: `Inference.once`.
        """

        def encode(start: Callable[[nn.Module], PackedState]) -> Tensor:
            state = LayerState.unpack(run_once(start), self.core.carried_names)
            return state.carried[MEMORY].transpose(0, 1)

        return self.condition.prepare(known, encode)

    def given(self, tokens: Tensor) -> Tensor:
        """Return tokens `[b, n, ...]` in raster order as the model predicts them.

        Args:
            tokens: as the tokenizer gives them.

        Raises:
            UserError: a learned transform mixes all of an image, so that a part of its tokens knows
                the rest.
        """
        if self.has_transform:
            raise UserError(
                "with objective.adapter_blocks a token depends on the whole image: no part of an"
                " image can be given"
            )
        return self.reads.sequence(tokens)

    def undo(self, layer: nn.Module, tokens: Tensor) -> Tensor:
        """Return tokens as the tokenizer gives them, of those that the model predicts."""
        if self.has_transform:
            assert isinstance(layer, Reader)
            tokens = layer.untransformed(tokens, self.reads.grid[0])
        return self.reads.from_sequence(tokens)

    def check_images(self, folder: Path) -> None:
        """Raise UserError where nothing makes images of the tokens."""
        self.reads.check_images(folder)

    def to_images(self, tokens: Tensor, folder: Path) -> Tensor:
        """Return images uint8 `[b, H, W, 3]` of tokens as `undo` gives them.

        Args:
            tokens: in raster order.
            folder: of the run, which may hold what decodes them.

        Raises:
            UserError: nothing decodes them.
        """
        return self.reads.to_images(tokens, folder)
