"""Callbacks of the training loop, called with the state after each step."""

from __future__ import annotations

import gc
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from megavis.data.loading.loader import Readable, evaluation_batches
from megavis.model.flops import peak_flops
from megavis.model.inference import Inference
from megavis.training.engine import Engine

_VALIDATED = ("validation_loss", "validation_accuracy")
_OF_TRAINING = ("lr", "grad_norm", "samples_per_s")


@dataclass
class StepState:
    """What callbacks see after a step; `record` becomes the step's line of metrics."""

    step: int
    """Optimizer steps taken so far."""
    last_step: int
    loss: Tensor | None
    """On the device; reading it waits for the device. None before the first step."""
    engine: Engine
    record: dict[str, float] = field(default_factory=dict)
    images: dict[str, np.ndarray] = field(default_factory=dict)
    wants_checkpoint: bool = False
    """A callback sets it, the same on every process: this step is saved, due or not."""
    stop: str | None = None
    """Why training ends here and now; a callback sets it, the same on every process."""
    goes_back: bool = False
    """Set by a callback with `stop`: the last steps are dropped, so this one is not saved."""

    @property
    def is_last(self) -> bool:
        """True where no step follows."""
        return self.step == self.last_step or self.stop is not None

    def is_due(self, every: int) -> bool:
        """True every so many steps and at the end; never where `every` is 0."""
        return bool(every) and (self.step % every == 0 or self.step == self.last_step)


class Callback(Protocol):
    """A side job; called on every process after every step, and once before the first."""

    def __call__(self, state: StepState) -> None:
        """Look at the state; may add to its record."""


class LogMetrics:
    """Loss, learning rate, gradient norm and throughput, every N steps."""

    def __init__(self, every: int, *, flops_per_image: float, tokens_per_image: int) -> None:
        self.every, self.flops, self.tokens = every, flops_per_image, tokens_per_image
        self._since: tuple[int, float] | None = None

    def __call__(self, state: StepState) -> None:
        """Record the step's numbers where they are due."""
        if state.loss is None or not state.is_due(self.every):
            return
        engine = state.engine
        state.record["loss"] = engine.mean_over_data(state.loss)
        state.record["lr"] = engine.rate(state.step - 1)
        # Infinite where an fp16 step overflowed and was skipped.
        state.record["grad_norm"] = engine.gradient_norm()
        if (scale := engine.loss_scale()) is not None:
            state.record["loss_scale"] = scale.scale
        state.record["samples_seen"] = state.step * engine.config.training.batch_size
        state.record.update(self._throughput(state))

    def restart_clock(self, state: StepState) -> None:
        """Leave out of the speeds what the other callbacks took; called after them.

        The clock first runs after the first step, which warms everything up.
        """
        began = state.loss is not None
        if began and (self._since is None or state.record or state.images):
            self._since = (state.step, time.perf_counter())

    def _throughput(self, state: StepState) -> dict[str, float]:
        if self._since is None:
            return {}
        first_step, begin = self._since
        images = (state.step - first_step) * state.engine.config.training.batch_size
        rate = images / (time.perf_counter() - begin)
        speeds = {"samples_per_s": rate, "tokens_per_s": rate * self.tokens}
        context = state.engine.context
        if context.device.type == "cuda":
            peak = peak_flops(torch.cuda.get_device_name(context.device))
            if peak:
                speeds["mfu"] = rate * self.flops / (peak * context.world.size)
        return speeds


_COUNT = "images"


class Validate:
    """Mean loss on held-out images, every N steps and before the first."""

    def __init__(
        self,
        dataset: Readable,
        every: int,
        num_images: int,
        *,
        is_urgent: Callable[[], bool] = lambda: False,
    ) -> None:
        """Prepare.

        Args:
            dataset: held-out images.
            every: steps between two validations.
            num_images: so many of them.
            is_urgent: asked before each batch, on all processes at once, whether to break off.
        """
        self.dataset, self.every, self.num_images = dataset, every, num_images
        self.is_urgent = is_urgent

    def __call__(self, state: StepState) -> None:
        """Record `validation_loss` where it is due."""
        if state.is_due(self.every):
            with state.engine.evaluated():
                # Before the first step there is nothing to save, and so nothing to hurry for.
                measured = self.measure(state.engine, may_break_off=state.step > 0)
            state.record.update({f"validation_{name}": v for name, v in measured.items()})

    def measure(self, engine: Engine, *, may_break_off: bool) -> dict[str, float]:
        """Return the mean loss over the held-out images, and what else the objective measures.

        Every process calls this. Nothing is returned where it was broken off.
        """
        runner = Inference(engine.layers, engine.context)
        batches = evaluation_batches(
            self.dataset,
            batch_size=engine.micro_batch_size,
            data_parallel_rank=engine.context.data.rank,
            data_parallel_size=engine.context.data.size,
            limit=min(self.num_images, len(self.dataset)),
        )
        sums: dict[str, Tensor] = {}
        for batch in batches:
            if may_break_off and self.is_urgent():
                return {}
            sequence = engine.objective.sequence(batch.to(engine.context.device))
            predictions = runner.predictions(sequence.inputs)
            with torch.no_grad():
                loss = engine.objective.loss(predictions, sequence.targets)
                measured = engine.objective.measures(predictions, sequence.targets)
            one = torch.ones((), device=loss.device)
            for name, value in {"loss": loss, **measured, _COUNT: one}.items():
                sums[name] = sums.get(name, 0.0) + value.double() * len(batch)
        total = torch.stack(list(sums.values()))
        torch.distributed.all_reduce(total, group=engine.context.data.group)
        means = dict(zip(sums, (total / total[-1]).tolist(), strict=True))
        return {name: mean for name, mean in means.items() if name != _COUNT}


class CollectGarbage:
    """Python's collector at fixed steps instead of whenever.

    Left alone it stops each process at another time, and all others wait for it.
    """

    def __init__(self, every: int = 200) -> None:
        self.every = every
        gc.disable()

    def __call__(self, state: StepState) -> None:
        """Collect where it is due; at the end, give control back to Python."""
        if state.is_due(self.every):
            gc.collect()
        if state.is_last:
            gc.enable()


class ShowProgress:
    """A progress bar on a terminal, plain lines in a log; on the main process alone.

    On a terminal the numbers of training follow the bar, each over the last; what was
    validated keeps a line of its own.
    """

    def __init__(self, first_step: int, last_step: int) -> None:
        self._on_terminal = sys.stderr.isatty()
        self._bar = tqdm(
            total=last_step,
            initial=first_step,
            unit="step",
            dynamic_ncols=True,
            disable=not self._on_terminal,
        )

    def __call__(self, state: StepState) -> None:
        """Advance the bar; show the step's numbers where there are any."""
        if state.loss is not None:
            self._bar.update(1)
        if self._on_terminal and "loss" in state.record:
            self._bar.set_postfix_str(f"loss {state.record['loss']:.4g}", refresh=False)
        names = _VALIDATED if self._on_terminal else ("loss", *_VALIDATED, *_OF_TRAINING)
        text = "  ".join(f"{k} {state.record[k]:.4g}" for k in names if k in state.record)
        if text:
            tqdm.write(f"step {state.step}/{state.last_step}  {text}", file=sys.stderr)
        if state.is_last:
            self._bar.close()
