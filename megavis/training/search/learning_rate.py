"""The learning-rate search of iGPT (Generative Pretraining from Pixels, sections 3.4 and A.1).

Rates are tried one after another from large to small, until the final validation loss starts to
rise or, in fine-tuning, which may stop early, until the best validation accuracy starts to fall.
Too high a rate causes a loss spike from which training does not recover, or too many bad steps in a
row; such a run is given up as soon as this is clear. Every run is an ordinary run folder, so a
killed search resumes: finished and given-up runs are kept, and an interrupted one resumes. The
results are a Markdown table, a CSV table and a plot.
"""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from megavis.config.errors import UserError
from megavis.config.schema import RunConfig
from megavis.data.format.files import write_atomically
from megavis.evaluation.figures import Row, markdown_table, plain_axes, write_png, write_table
from megavis.parallel.context import ParallelContext, end_engines
from megavis.training.callbacks.callback import StepState
from megavis.training.callbacks.validation import accuracy_history
from megavis.training.metrics import read_metrics
from megavis.training.search.trial import (
    check_trial,
    give_up,
    given_up_at,
    is_finished,
    train_trial,
)

if TYPE_CHECKING:
    from matplotlib.figure import Figure


PAPER_RATES = (0.01, 0.003, 0.001, 0.0003, 0.0001)
"""From section 3.4, whose list is open-ended; the smallest rate of Table 5 is 0.0003."""


@dataclass(frozen=True)
class TrialResult:
    """Result of one rate."""

    rate: float
    folder: str
    state: Literal["finished", "given up", "unfinished"]
    step: int
    """Where the run ended."""
    validation_loss: float
    """Final validation loss; infinite if the run did not finish."""
    accuracy: float | None = None
    """Highest validation accuracy; None if none is measured or the run did not finish."""

    def is_worse_than(self, other: TrialResult) -> bool:
        """Compare by accuracy, as in fine-tuning (section 3.4), or else by loss."""
        if self.accuracy is not None and other.accuracy is not None:
            return self.accuracy < other.accuracy
        return self.validation_loss > other.validation_loss


class SpikeWatch:
    """A callback that gives up a run whose loss rises and stays high, or is not a number.

    Losses logged before an interruption are read from the run's folder; see `is_lost` for
    `patience`.
    """

    def __init__(self, folder: Path, patience: int) -> None:
        self._folder, self._patience = folder, patience
        self._losses: list[float] | None = None

    def __call__(self, state: StepState) -> None:
        """Check the step's loss if it was logged; every process decides the same."""
        if state.loss is None or "loss" not in state.record:
            return
        if self._losses is None:
            logged = [record for record in read_metrics(self._folder) if "loss" in record]
            self._losses = [each["loss"] for each in logged if each["step"] < state.step]
        self._losses.append(state.record["loss"])
        context = state.engine.context
        # Only the main process decides, since sums may round differently on others.
        if not context.from_main(is_lost(self._losses, self._patience)):
            return
        state.stop = "the loss rose and stays high"
        if context.is_main:
            steps = state.last_step
            give_up(self._folder, step=state.step, steps=steps, reason=state.stop)


def is_lost(losses: Sequence[float], patience: int) -> bool:
    """Return whether training has had a loss spike without recovering.

    A loss is high if it exceeds the lowest one so far by more than half of what the run had gained
    since its first, and by more than 5 % of the first, which excludes the noise of a plateau.

    Args:
        losses: all logged losses, in order.
        patience: consecutive high losses, up to the last; one that is not finite is enough.
    """
    if not all(map(math.isfinite, losses)):
        return True
    lowest, in_a_row = math.inf, 0
    for loss in losses:
        lowest = min(lowest, loss)
        height = max(0.5 * (losses[0] - lowest), 0.05 * abs(losses[0]))
        in_a_row = in_a_row + 1 if loss > lowest + height else 0
    return in_a_row >= patience


def search_rates(
    config: RunConfig,
    rates: Sequence[float],
    context: ParallelContext,
    *,
    patience: int = 10,
    report: Callable[[TrialResult], None],
) -> list[TrialResult]:
    """Try rates from large to small until the final validation loss starts to rise.

    Called on every process. So is `report`, with each outcome, also of an earlier search.

    Args:
        config: config of all runs, except for rate and name.
        rates: in any order, each above 0.
        patience: see `is_lost`.

    Returns:
        The outcomes, largest rate first.

    Raises:
        UserError: there are no validation data or no rates above 0, or a folder holds a run that
            was trained otherwise than its rate's.
    """
    if config.data.validation is None:
        raise UserError("the search compares validation losses: set data.validation")
    if not rates or not all(rate > 0 and math.isfinite(rate) for rate in rates):
        raise UserError(f"the rates must be numbers above 0, not {list(rates)}")
    outcomes: list[TrialResult] = []
    for rate in sorted(set(rates), reverse=True):
        trial = config_for(config, rate)
        context.on_main(partial(check_trial, trial))
        # The folder may appear older on another node.
        outcome = context.from_main(read_outcome(trial))
        if outcome.state == "unfinished":
            watch = SpikeWatch(trial.folder, patience)
            train_trial(trial, context, [watch])
            # An engine contains reference cycles, and the next one needs its memory.
            end_engines()
            gc.collect()
            outcome = context.from_main(read_outcome(trial))
        outcomes.append(outcome)
        report(outcome)
        if len(outcomes) > 1 and outcome.is_worse_than(outcomes[-2]):
            break
    return outcomes


def best_of(outcomes: Sequence[TrialResult]) -> TrialResult | None:
    """Return the run with the highest accuracy, or lowest final loss; None if none finished."""
    finished = [outcome for outcome in outcomes if outcome.state == "finished"]
    if any(outcome.accuracy is not None for outcome in finished):
        return max(finished, key=lambda outcome: outcome.accuracy or 0.0)
    return min(finished, key=lambda outcome: outcome.validation_loss, default=None)


def config_for(config: RunConfig, rate: float) -> RunConfig:
    """Return the config of one rate's run, which ends with a validation."""
    training = config.training
    every = training.validate_every or training.steps
    return config.model_copy(
        update={
            "name": f"{config.name}-lr-{rate:g}",
            "optimizer": config.optimizer.model_copy(update={"learning_rate": rate}),
            "training": training.model_copy(update={"validate_every": every}),
        }
    )


def read_outcome(config: RunConfig) -> TrialResult:
    """Return the result from the run's folder."""
    folder = config.folder
    rate = config.optimizer.learning_rate
    if (step_given_up := given_up_at(config)) is not None:
        return TrialResult(rate, str(folder), "given up", step_given_up, math.inf)
    records = read_metrics(folder)
    last = records[-1] if records else {"step": 0}
    loss, step = last.get("validation_loss", math.nan), int(last["step"])
    # Objectives other than fine-tuning may measure an accuracy of something else.
    history = accuracy_history(records) if config.finetune else []
    if not is_finished(config, folder):
        return TrialResult(rate, str(folder), "unfinished", step, math.inf)
    if not math.isfinite(loss):
        return TrialResult(rate, str(folder), "given up", step, math.inf)
    accuracy = max((accuracy for _, accuracy in history), default=None)
    return TrialResult(rate, str(folder), "finished", step, loss, accuracy)


def rows_of(outcomes: Sequence[TrialResult]) -> list[Row]:
    """Return one row per rate; the loss of a run that did not finish is empty."""
    best = best_of(outcomes)
    return [
        {
            "learning_rate": f"{outcome.rate:g}",
            "state": outcome.state,
            "step": outcome.step,
            "validation_loss": (
                f"{outcome.validation_loss:.6f}" if math.isfinite(outcome.validation_loss) else ""
            ),
            "validation_accuracy": ("" if outcome.accuracy is None else f"{outcome.accuracy:.6f}"),
            "best": "yes" if outcome == best else "",
            "run": outcome.folder,
        }
        for outcome in outcomes
    ]


def markdown_of(outcomes: Sequence[TrialResult]) -> str:
    """Return the rows as a Markdown table."""
    rows = rows_of(outcomes)
    columns = [key.replace("_", " ") for key in rows[0]]
    lines = markdown_table(columns, ([str(value) for value in row.values()] for row in rows))
    return "".join(f"{line}\n" for line in lines)


def plot_search(outcomes: Sequence[TrialResult], *, name: str) -> Figure:
    """Plot the final validation loss over the rate; given-up runs are at the top."""
    figure, axes = plain_axes("learning rate", "final validation loss")
    axes.set_xscale("log")
    finished = [outcome for outcome in outcomes if outcome.state == "finished"]
    axes.plot([o.rate for o in finished], [o.validation_loss for o in finished], "o-")
    for outcome in outcomes:
        if outcome.state != "finished":
            # In axes coordinates, since a given-up run has no loss.
            place = axes.get_xaxis_transform()
            axes.plot([outcome.rate], [0.96], "x", color="#c2571a", transform=place)
            text = f"given up at step {outcome.step}"
            axes.annotate(text, (outcome.rate, 0.92), xycoords=place, ha="center", fontsize="small")
    best = best_of(outcomes)
    title = "no run finished" if best is None else f"best: {best.rate:g}"
    axes.set_title(f"{name}; {title}", fontsize="medium")
    axes.margins(0.15, 0.15)
    return figure


def write_search(folder: Path, outcomes: Sequence[TrialResult], *, name: str) -> list[Path]:
    """Write `search.png`, `search.csv` and `search.md`; returns them. Raises OSError."""
    picture, text = folder / "search.png", folder / "search.md"
    write_png(picture, plot_search(outcomes, name=name))
    table = write_table(folder / "search.csv", rows_of(outcomes))
    write_atomically(text, markdown_of(outcomes).encode())
    return [picture, table, text]
