"""Held-out images during training: mean loss, grids, early stopping, evaluation of checkpoints.

"Generative Pretraining from Pixels", section 3.4: fine-tuning stops early, at the highest
validation accuracy. Pre-training may do the same.

Checkpoints are evaluated by `megavis evaluate watch` in a child process. Training shares only a
pipe with it, which closes when training ends, even if it is killed. The child reads checkpoints, so
no step waits for it.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from megavis.composition.trainable import Trainable
from megavis.config.errors import UserError, start_needs
from megavis.config.schema import RunConfig
from megavis.config.section import EvaluationConfig
from megavis.data.format.files import make_within
from megavis.data.loading.blended_dataset import Samples
from megavis.data.loading.loader import evaluation_batches, read_batch
from megavis.evaluation.results import EarlyStoppingResult
from megavis.model.inference import Inference
from megavis.parallel.context import ParallelContext
from megavis.sampling.pictures import Gallery, save_png
from megavis.training.callbacks.callback import Callback, StepState
from megavis.training.metrics import MetricsWriter, read_metrics


class Validate:
    """Mean loss on held-out images, every N steps and before the first.

    `is_urgent` is called before each batch, on all processes, to decide whether to abort.
    """

    def __init__(
        self,
        dataset: Samples,
        every: int,
        num_images: int,
        *,
        is_urgent: Callable[[], bool] = lambda: False,
    ) -> None:
        self.dataset, self.every, self.num_images = dataset, every, num_images
        self.is_urgent = is_urgent

    def __call__(self, state: StepState) -> None:
        """Record `validation_loss` if due."""
        if state.is_due(self.every):
            with state.engine.evaluated():
                # Before the first step there is nothing to save, so no need to hurry.
                measured = self.measure(state, may_break_off=state.step > 0)
            state.record.update({f"validation_{name}": v for name, v in measured.items()})

    def catch_up(
        self,
        state: StepState,
        callbacks: Sequence[Callback],
        metrics: MetricsWriter | None,
        run_folder: Path,
    ) -> None:
        """Repeat the validation that a signal aborted just before the run was saved.

        The metrics then equal an uninterrupted run's. Collective over all processes, with the state
        that was saved. `callbacks` run after the validation, as without an interruption; the
        metrics in the run folder show whether it was done.
        """
        if not state.is_due(self.every):
            return
        lines = read_metrics(run_folder)
        is_done = any("validation_loss" in line and line["step"] == state.step for line in lines)
        # The folder may appear older on another node.
        if state.engine.context.from_main(is_done):
            return
        for callback in (self, *callbacks):
            callback(state)
        if metrics is not None and state.record:
            metrics.amend(state.step, state.record)

    def measure(self, state: StepState, *, may_break_off: bool) -> dict[str, float]:
        """Return the mean loss over the held-out images, and the objective's other metrics.

        Called on every process. The result is empty if aborted; a metric of nothing, such as the
        objects found in images without any, is left out.
        """
        engine = state.engine
        inference = Inference(engine.layers, engine.context)
        batches = evaluation_batches(
            self.dataset,
            batch_size=engine.micro_batch_size,
            data_parallel_rank=engine.context.data.rank,
            data_parallel_size=engine.context.data.size,
            limit=self.num_images,
            label=None,
        )
        # In float64, so that counts are exact: equal accuracies are equal however they are added.
        sums: dict[str, Tensor] = {}
        for batch in batches:
            state.renew()
            if may_break_off and self.is_urgent():
                return {}
            sequence = engine.objective.sequence(batch.to(engine.context.device))
            predictions = inference.predictions(sequence.inputs)
            with torch.no_grad():
                loss = engine.objective.held_out_loss(predictions, sequence.targets, len(batch))
                measured = engine.objective.measures(predictions, sequence.targets)
            for name, (total, count) in {"loss": loss, **measured}.items():
                if not isinstance(count, Tensor):
                    # Unlike `as_tensor`, it does not wait for a GPU.
                    count = torch.full((), count, device=total.device)
                pair = torch.stack([total.double(), count.double()]) * (not batch.is_repeated)
                sums[name] = sums.get(name, 0.0) + pair
        pairs = torch.stack(list(sums.values()))
        torch.distributed.all_reduce(pairs, group=engine.context.data.group)
        found = zip(sums, pairs.tolist(), strict=True)
        return {name: total / count for name, (total, count) in found if count}


class SampleImages:
    """Writes a grid every N steps to `samples/` and TensorBoard.

    `dataset` has held-out images to start from; None for unconditional samples. Raises UserError if
    the objective does not support such samples.
    """

    def __init__(
        self,
        run_folder: Path,
        dataset: Samples | None,
        *,
        objective: Trainable,
        every: int,
        num_images: int,
    ) -> None:
        try:
            self.gallery = Gallery(objective, run_folder, has_examples=dataset is not None)
        except UserError as error:
            raise UserError(f"{error}; 0 makes no grids", key="training.sample_every") from None
        self.folder, self.every, self.num_images = run_folder, every, num_images
        self._has_warned = False
        self.examples = None
        if dataset is not None:
            # Spread over the data set, which may be sorted by class.
            places = np.linspace(0, len(dataset) - 1, num_images).astype(np.int64)
            self.examples = read_batch(dataset, places, places)

    def __call__(self, state: StepState) -> None:
        """Sample if due, but neither before the first step nor when training stops.

        Training continues without a grid that cannot be written, as on a full disk, or that takes
        more memory than is free; later ones then have half as many images.
        """
        if state.loss is None or state.stop is not None or not state.is_due(self.every):
            return
        if self.num_images == 0:
            return
        engine = state.engine
        pixels = self._drawn(state)
        # One process may have less free memory than others: all draw equally many images next time.
        if not engine.context.smallest(pixels is not None):
            self._draw_fewer(state)
        elif engine.context.is_main:
            assert pixels is not None
            state.images["samples"] = pixels
            try:
                folder = make_within(self.folder, "samples")
                save_png(folder / f"step-{state.step:08d}.png", pixels)
            except OSError as error:
                text = f"WARNING: image grid of step {state.step} not written: {error}"
                tqdm.write(f"{text}; training continues", file=sys.stderr)

    def _drawn(self, state: StepState) -> np.ndarray | None:
        """Return the grid; None if this process has too little memory for it."""
        engine = state.engine
        # CUDA graphs would keep their memory, which the next training step needs. Under ZeRO-3 each
        # token gathers all weights again, so that a grid may take longer than anything else.
        inference = Inference(
            engine.layers, engine.context, captures=False, before_pass=state.renew
        )
        examples = self.examples and self.examples.to(engine.context.device)
        # Caught inside: all processes gather the weights again at the end.
        with engine.evaluated():
            try:
                return self.gallery.plot(inference, examples, num_images=self.num_images)
            except torch.OutOfMemoryError:
                return None

    def _draw_fewer(self, state: StepState) -> None:
        if torch.cuda.is_initialized():
            # Free the cached memory of the grid, whose fragments may be too small for a step.
            torch.cuda.empty_cache()
        if state.engine.context.is_main and not self._has_warned:
            tqdm.write(
                f"WARNING: image grid of step {state.step} takes more memory than is free; training"
                f" continues without it, and the next has {self.num_images // 2} of"
                f" {self.num_images} images",
                file=sys.stderr,
            )
        self._has_warned = True
        self.num_images //= 2


ACCURACY = "validation_accuracy"
"""Key of `metrics.jsonl` used for the decision."""


class EarlyStopping:
    """A callback that checkpoints the best step, and stops without further improvement.

    Attributes:
        patience: validations without improvement after which training stops; 0 for never.
        history: step and accuracy of each validation so far, the same on every process.
    """

    def __init__(self, patience: int, history: Iterable[tuple[int, float]] = ()) -> None:
        self.patience, self.history = patience, list(history)

    @classmethod
    def resume(
        cls, patience: int, run_folder: Path, step: int, context: ParallelContext
    ) -> EarlyStopping:
        """Return the state of a run after `step` steps; called on every process."""
        history = [
            entry for entry in accuracy_history(read_metrics(run_folder)) if entry[0] <= step
        ]
        # The folder may appear older on another node.
        return cls(patience, context.from_main(history))

    def __call__(self, state: StepState) -> None:
        """Check the step's accuracy if it was measured, after the first step."""
        if state.step == 0 or ACCURACY not in state.record:
            return
        # Use the main process's value: the last bit may differ elsewhere.
        accuracy = state.engine.context.from_main(state.record[ACCURACY])
        self.history.append((state.step, accuracy))
        if self.is_over:
            state.stop = f"no new best accuracy in {self.patience} validations"
        state.wants_checkpoint |= self.is_over or self.best_step == state.step

    @property
    def best_step(self) -> int | None:
        """The first step with the highest accuracy; None before the first validation."""
        return self.best_of([step for step, _ in self.history])

    def best_of(self, steps: Collection[int]) -> int | None:
        """Return the best of these steps; None if none of them was validated.

        A checkpoint that could not be written does not end training, so the best step may have
        none.
        """
        measured = [entry for entry in self.history if entry[0] in steps]
        best = max(measured, key=lambda entry: (entry[1], -entry[0]), default=None)
        return best and best[0]

    def record(self, path: Path, saved: Collection[int]) -> None:
        """Write and print the best of the saved steps, if one was validated. Raises OSError."""
        best = self.best_of(saved)
        if best is not None:
            accuracy = dict(self.history)[best]
            EarlyStoppingResult(best, accuracy).write(path)
            sys.stdout.write(f"best step {best}: validation accuracy {accuracy:.1%}, {path}\n")

    @property
    def is_over(self) -> bool:
        """Whether the last `patience` validations brought no improvement."""
        if not self.patience or not self.history:
            return False
        since = [step for step, _ in self.history if step > (self.best_step or 0)]
        return len(since) >= self.patience


def accuracy_history(records: Iterable[Mapping[str, Any]]) -> list[tuple[int, float]]:
    """Return step and accuracy of each record of `metrics.jsonl` that has one, after step 0."""
    return [
        (int(record["step"]), record[ACCURACY])
        for record in records
        if ACCURACY in record and record["step"] > 0
    ]


LOG_NAME = "watch.log"
# A launcher sets these for its own processes; the child is not one of them.
_LAUNCHER_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_POLL_SECONDS = 1.0


@contextlib.contextmanager
def evaluate_during(config: RunConfig, context: ParallelContext) -> Iterator[None]:
    """Evaluate checkpoints while the block trains, if the config has `evaluation`.

    At the end, all processes wait for the newest checkpoint's metrics, at most
    `evaluation.finish_within` seconds; after an error or a signal, they do not wait.

    Raises:
        UserError: on every process, if the run folder has no room or may not be written.
        OSError: likewise, if the evaluation cannot start.
    """
    settings = config.evaluation
    if settings is None:
        yield
        return
    started: list[subprocess.Popen[bytes]] = []
    with start_needs(config.folder):
        context.on_main(lambda: started.append(_start(config, settings)))
    if not started:
        yield
        # Launchers end a process that outlives the others: srun does so after a minute.
        while not context.from_main(True):
            time.sleep(_POLL_SECONDS)
        return
    [child], path = started, _log_of(config)
    try:
        yield
        _finish(child, path, context, within=settings.finish_within)
    finally:
        child.kill()
        child.wait()


def _start(config: RunConfig, settings: EvaluationConfig) -> subprocess.Popen[bytes]:
    """Start the child process. Raises OSError."""
    path = _log_of(config)
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab") as log:
        return subprocess.Popen(  # noqa: S603 - our own command
            watch_command(config.folder, settings, seed=config.seed),
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=log,
            env=_environment(settings),
        )


def _log_of(config: RunConfig) -> Path:
    return config.folder / "evaluation" / LOG_NAME


def watch_command(folder: Path, settings: EvaluationConfig, *, seed: int) -> list[str]:
    """Return the command for the config's section."""
    given = settings.model_dump(exclude={"threads", "finish_within"}, exclude_none=True)
    given |= {"what": ",".join(settings.what), "seed": seed}
    options = {f"--{name.replace('_', '-')}": str(value) for name, value in given.items()}
    words = [word for option in options.items() for word in option]
    program = [sys.executable, "-m", "megavis.cli", "evaluate", "watch", str(folder)]
    # Features of every checkpoint of a long run would fill the disk.
    return [*program, *words, "--no-cache", "--until-input-ends"]


def _environment(settings: EvaluationConfig) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if name not in _LAUNCHER_VARIABLES}
    kept["OMP_NUM_THREADS"] = str(settings.threads)
    if settings.device == "cpu":
        kept["CUDA_VISIBLE_DEVICES"] = ""
    return kept


def _finish(
    child: subprocess.Popen[bytes], log: Path, context: ParallelContext, *, within: float
) -> None:
    """Wait for the child to finish, with all processes, and warn if it did not or failed."""
    assert child.stdin is not None
    child.stdin.close()
    deadline, is_over = time.monotonic() + within, False
    while not is_over:
        # Wait in short intervals: a collective may time out before the evaluation ends.
        patience = min(_POLL_SECONDS, deadline - time.monotonic())
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(max(patience, 0.0))
        is_over = context.from_main(child.returncode is not None or time.monotonic() >= deadline)
    if child.returncode is None:
        trouble = f"not done {within:g} s after the end (evaluation.finish_within)"
    elif child.returncode:
        trouble = f"ended with code {child.returncode}"
    else:
        return
    sys.stderr.write(f"WARNING: evaluation during training: {trouble}; see {log}\n")
