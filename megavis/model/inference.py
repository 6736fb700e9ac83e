"""Forward passes outside training, in any layout: validation, sampling, features.

All methods are collective: every process of the job calls them with the same inputs and gets the
same results. Pipeline stages run one after another, since a single forward pass has nothing to
overlap.

Legend: b images, s tokens, h hidden size, L blocks.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megavis.model.context_parallel import splits_context
from megavis.model.core import Block
from megavis.model.decoding import IncrementalDecoder
from megavis.model.kernels import chosen_kernels
from megavis.model.layer_state import PackedState
from megavis.model.stack import LocalLayers, Phase, Predictions, watch_features
from megavis.model.tensor_parallel import splits_tokens, whole_tokens
from megavis.model.visibility import KeyValueCache
from megavis.parallel.context import ParallelContext

Finish = Callable[[Any, Any], Predictions]
"""Replaces the head: maps the head and its input to predictions."""


class Inference:
    """Runs the model, of which this process holds some layers.

    Args:
        captures: whether single tokens may be decoded by CUDA graphs, which keep their memory.
        before_pass: called before each pass of `predictions`, to see that many of them go on.
    """

    def __init__(
        self,
        layers: LocalLayers,
        context: ParallelContext,
        *,
        captures: bool = True,
        before_pass: Callable[[], None] = lambda: None,
    ) -> None:
        self.layers, self.context, self.captures = layers, context, captures
        self.before_pass = before_pass

    @torch.no_grad()
    def predictions(
        self,
        inputs: tuple[Tensor, ...],
        *,
        cache: KeyValueCache | None = None,
        finish: Finish | None = None,
        whole: bool = False,
        phase: Phase | None = None,
    ) -> Any:
        """Return the head's output, the input of the objective's `loss` and `outputs`.

        Args:
            cache: KV cache of earlier tokens; `inputs` then contains only the new ones.
            finish: called on the last stage instead of the head, with the head and its input.
            whole: do not split tokens under sequence or context parallelism, since the length of a
                sequence in generation need not divide.
            phase: run only the layers of this phase; None for all.
        """
        self.before_pass()
        layers = None if phase is None else self.layers.of_phase(phase)
        with self.evaluating(), whole_tokens() if whole else contextlib.nullcontext():
            predictions = self._walk(inputs, cache, finish, layers=layers)
        if cache is not None:
            cache.advance()
        return predictions

    @property
    def is_alone(self) -> bool:
        """True if passes of this process communicate with no other: it holds all weights.

        Under ZeRO-3 it does not: weights are gathered only while a module runs.
        """
        holds_weights = all(p.numel() for _, p in self.layers.named_parameters())
        return holds_weights and self.context.model.size == self.context.context.size == 1

    def cache(self, capacity: int, *, static: bool | None = None) -> KeyValueCache:
        """Return a KV cache for sequences of up to `capacity` tokens, for `predictions`.

        It is an `IncrementalDecoder`, which also runs the blocks on single tokens, if possible.
        With `static` and one process per layer, its steps are CUDA graphs on a GPU, or raise
        RuntimeError. By default, graphs are used where they can be captured if `captures` is set
        and `training.kernels` is not `torch`.
        """
        blocks = [layer for layer in self.layers.of_phase("step") if isinstance(layer, Block)]
        if not IncrementalDecoder.suits(blocks):
            return KeyValueCache(capacity)
        strict, alone = static is True, self.context.tensor.size == 1
        if static is None:
            is_cuda = self.context.device.type == "cuda"
            static = self.captures and is_cuda and chosen_kernels() != "torch"
        return IncrementalDecoder(blocks, capacity, static=static and alone, strict=strict)

    @torch.no_grad()
    def features(self, inputs: tuple[Tensor, ...]) -> Tensor:
        """Return the features of each feature layer, averaged over tokens.

        "Generative Pretraining from Pixels", section 2.4: f^l = mean of n^l over the sequence, for
        l from 0 (the first block's norm) to L (the norm before the head). With `model.features:
        blocks`, it is the mean of these norms' inputs. Layers above the last feature layer do not
        run.

        Returns:
            float32 `[L + 1, b, h]`.
        """
        pooled: list[Tensor] = []
        with contextlib.ExitStack() as hooks, self.evaluating():
            for layer in self.layers.feature_layers():
                hook = watch_features(layer, lambda features: pooled.append(self._pool(features)))
                hooks.enter_context(hook)
            self._walk(inputs, None, layers=self.layers.up_to_features())
        # A stage may have no feature layer.
        here, stages = tuple(pooled), range(self.context.pipeline.size)
        return torch.stack([each for stage in stages for each in self._from_stage(stage, here)])

    def last_features(self, inputs: tuple[Tensor, ...]) -> Tensor:
        """Return the features of every token at the last feature layer, `[b, s, h]`.

        On one process, which has this layer.
        """
        kept: list[Tensor] = []
        with watch_features(self.layers.feature_layers()[-1], kept.append):
            self.features(inputs)
        return kept[0].transpose(0, 1)

    @torch.no_grad()
    def on_first_stage(self, job: Callable[[nn.Module], Tensor]) -> Tensor:
        """Apply a function to the first layer; return its output on every stage."""
        made: Predictions | None = None
        if self.context.is_first_stage:
            with self.evaluating():
                made = job(self.layers.modules[0])
        made = self._from_stage(0, made)
        assert isinstance(made, Tensor)
        return made

    @torch.no_grad()
    def once(self, start: Callable[[nn.Module], PackedState]) -> PackedState:
        """Run the layers of phase `once`, after `start`, on every process; return their output."""
        with self.evaluating(), whole_tokens():
            first = start(self.layers.modules[0]) if self.context.is_first_stage else ()
            return self._walk(first, None, layers=self.layers.of_phase("once"))

    def _walk(
        self,
        inputs: PackedState,
        cache: KeyValueCache | None,
        finish: Finish | None = None,
        *,
        layers: Sequence[nn.Module] | None = None,
    ) -> Predictions:
        """Run all stages one after another, each with `layers` if given, else all its layers."""
        state: PackedState | None = inputs if self.context.is_first_stage else None
        for stage in range(self.context.pipeline.size):
            if stage == self.context.pipeline.rank:
                assert state is not None
                state = self._run_local(state, cache, finish, layers)
            state = self._from_stage(stage, state)
        assert state is not None
        return state

    def _run_local(
        self,
        state: PackedState,
        cache: KeyValueCache | None,
        finish: Finish | None,
        layers: Sequence[nn.Module] | None,
    ) -> PackedState:
        layers = self.layers.modules if layers is None else layers
        finishes = finish is not None and self.context.is_last_stage
        called = layers[:-1] if finishes else layers
        for are_blocks, group in itertools.groupby(called, lambda each: isinstance(each, Block)):
            if are_blocks and isinstance(cache, IncrementalDecoder) and cache.is_next(state):
                state = cache.step(state)
                continue
            for layer in group:
                state = layer(state, cache) if are_blocks else layer(state)
        return finish(layers[-1], state) if finish is not None and finishes else state

    def _from_stage(self, stage: int, state: Predictions | None) -> Predictions:
        """Broadcast the state of one stage to all stages."""
        pipeline = self.context.pipeline
        if pipeline.size == 1:
            assert state is not None
            return state
        source = dist.get_global_rank(pipeline.group, stage)
        form: list[Any] = [None]
        sent: list[Tensor] = []
        if stage == pipeline.rank:
            assert state is not None
            sent = [t.contiguous() for t in ([state] if isinstance(state, Tensor) else state)]
            form = [(isinstance(state, Tensor), [(t.shape, t.dtype) for t in sent])]
        device = self.context.device
        # Shapes differ between stages and steps: receivers learn them before they allocate.
        dist.broadcast_object_list(form, src=source, group=pipeline.group, device=device)
        alone, shapes = form[0]
        if stage != pipeline.rank:
            sent = [torch.empty(shape, dtype=dtype, device=device) for shape, dtype in shapes]
        for tensor in sent:
            # Parts that are absent from `Samples` are empty tensors.
            if tensor.numel():
                dist.broadcast(tensor, src=source, group=pipeline.group)
        return sent[0] if alone else tuple(sent)

    def _pool(self, normalised: Tensor) -> Tensor:
        """Average `[s, b, h]` over all tokens, including other processes'."""
        total = normalised.float().sum(0)
        count = normalised.shape[0]
        blocks = [m for m in self.layers.modules if isinstance(m, Block)]
        if not blocks:
            return total / count
        config, context = blocks[0].config, self.context
        for splits, axis in (
            (splits_tokens(config), context.tensor),
            (splits_context(config), context.context),
        ):
            if splits:
                dist.all_reduce(total, group=axis.group)
                count *= axis.size
        return total / count

    @contextlib.contextmanager
    def evaluating(self) -> Iterator[None]:
        """Switch the layers to evaluation mode inside the block.

        Every pass does this itself, but it visits all modules, so wrap many short passes in one.
        """
        modules = [module for layer in self.layers.modules for module in layer.modules()]
        training = [module for module in modules if module.training]
        for module in training:
            module.training = False
        try:
            yield
        finally:
            # One by one: `train` would also switch those that were in evaluation mode.
            for module in training:
                module.training = True
