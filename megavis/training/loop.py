"""The training loop, the same for every paper and every layout."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from megavis.config.checks import check_config
from megavis.config.errors import UserError, counted
from megavis.data.loading.loader import Batch
from megavis.training.callbacks.callback import Callback, StepState
from megavis.training.engine import Engine
from megavis.training.faults.watchdog import LONGEST_WINDOW, Watchdog
from megavis.training.metrics import MetricsWriter


def train(
    engine: Engine,
    batches: Iterator[Batch],
    *,
    first_step: int,
    last_step: int,
    callbacks: Sequence[Callback],
    metrics: MetricsWriter | None,
    finish: Callback,
    watchdog: Watchdog,
) -> None:
    """Train from `first_step` to `last_step`, or until a callback stops.

    Args:
        batches: endless micro-batches, starting with the step after `first_step`.
        first_step: steps already taken.
        callbacks: called in this order on every process, and before the very first step.
        metrics: writer of the main process; None on the others.
        finish: called last; it saves, so that no checkpoint has a step whose metrics are missing.
        watchdog: ends the job if a step takes too long. The first step, which includes warm-up, and
            each part of the work after a step may take ten times as long.
    """
    if first_step == 0:
        # The untrained model is validated and sampled, since curves begin there. It is not saved: a
        # run without a checkpoint starts from the same weights.
        _after_step(StepState(0, last_step, None, engine), callbacks, metrics)
    for step in range(first_step, last_step):
        with watchdog.expect(f"step {step + 1}", times=LONGEST_WINDOW if step == first_step else 1):
            try:
                loss = engine.train_step(batches, step)
            except torch.OutOfMemoryError as error:
                # Later, another process may hold the memory, and a new start may succeed.
                if step > first_step:
                    raise
                raise _lack_of_memory(engine) from error
        state = StepState(step + 1, last_step, loss, engine, renew=watchdog.renew)
        with watchdog.expect(f"what follows step {step + 1}", times=LONGEST_WINDOW):
            _after_step(state, callbacks, metrics)
            state.renew()
            finish(state)
        if state.stop is not None:
            return


def _after_step(
    state: StepState, callbacks: Sequence[Callback], metrics: MetricsWriter | None
) -> None:
    for callback in callbacks:
        state.renew()
        callback(state)
    if metrics is None:
        return
    if state.record:
        metrics.write(state.step, state.record)
    for name, pixels in state.images.items():
        metrics.image(state.step, name, pixels)


def _lack_of_memory(engine: Engine) -> UserError:
    """Return what to change in the config if the first step does not fit into memory."""
    size, config = engine.micro_batch_size, engine.config
    choices = [str(size // n) for n in range(2, size + 1) if size % n == 0][:1]
    savings: list[tuple[str, str, list[Any]]] = [
        ("training", "precision", ["float32", "bf16"]),
        ("parallel", "activation_checkpointing", ["none", "selective", "full"]),
        ("parallel", "zero_stage", [0, 1, 2, 3]),
    ]
    for name, key, values in savings:
        section = getattr(config, name)
        now = getattr(section, key)
        for value in values[values.index(now) + 1 :] if now in values else []:
            changed = section.model_copy(update={key: value})
            if not any(check_config(config.model_copy(update={name: changed}))):
                choices.append(f"{name}.{key} {value}")
                break
    use = f"; use {' or '.join(choices)}" if choices else ""
    return UserError(
        f"a micro-batch of {counted(size, 'image')} does not fit into the memory of"
        f" {engine.context.device}{use} (megavis plan shows what fits)",
        key="training.micro_batch_size",
    )
