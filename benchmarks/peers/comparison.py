"""Train megavis and a peer in turns, and compare losses, weights and time."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from benchmarks.timing import ratio
from megavis.config.schema import RunConfig
from megavis.data.loading.dataset import ShardDataset
from megavis.data.loading.loader import Batch, BatchLoader
from megavis.papers import build_objective
from megavis.parallel.context import ParallelContext
from megavis.training.engine import Engine

TOLERANCE = 1e-4
"""Largest difference of the losses, in nats or squared deviations, at each of the first steps."""
COMPARED = 100
"""Steps to which the tolerance applies."""

Weights = Mapping[str, Tensor]


@dataclass(frozen=True)
class Peer:
    """A plain loop around another library's model.

    Attributes:
        step: takes a batch and the number of the step, and returns the loss.
        weights: returns the model's weights under megavis' names.
        average: returns the moving average of the weights, if the loop keeps one.
    """

    step: Callable[[Batch, int], float]
    weights: Callable[[], Weights]
    average: Callable[[], Weights] | None = None


@dataclass
class Result:
    """Result of a comparison.

    Attributes:
        name: name of what was trained.
        peer: the other library's model.
        batch_size: images per step.
        losses: losses of each step: of megavis, of the peer, and of the peer after one rounding of
            its first weights, if it was trained too.
        seconds: processor seconds of the training thread in each step, in the same order.
        weights: largest difference of a weight after the last step.
        average: largest difference of an averaged weight; None without an average.
    """

    name: str
    peer: str
    batch_size: int
    losses: list[tuple[float, ...]] = field(default_factory=list)
    seconds: list[tuple[float, ...]] = field(default_factory=list)
    weights: float = 0.0
    average: float | None = None

    @property
    def difference(self) -> float:
        """Largest difference of the losses in the first `COMPARED` steps; NaN if any is NaN."""
        return self._largest(0)

    @property
    def rounding(self) -> float | None:
        """The same between the peer and the peer after one rounding; None if not trained."""
        return self._largest(2) if len(self.losses[0]) > 2 else None

    def _largest(self, side: int) -> float:
        # Unlike max(), torch's maximum is NaN if any value is.
        losses = torch.tensor(self.losses[:COMPARED], dtype=torch.float64)
        return float((losses[:, side] - losses[:, 1]).abs().max())

    @property
    def agrees(self) -> bool:
        """True if the losses agree within the tolerance; NaN does not."""
        return self.difference <= TOLERANCE

    def row(self) -> dict[str, Any]:
        """Return a line of the report; rates are of the median step, ends of the last tenth."""
        ours, theirs = ([pair[side] for pair in self.seconds] for side in (0, 1))
        last = self.losses[-max(1, len(self.losses) // 10) :]
        return {
            "training": self.name,
            "peer": self.peer,
            "steps": len(self.losses),
            "batch": self.batch_size,
            "first loss": self.losses[0][0],
            "end, megavis": statistics.fmean(pair[0] for pair in last),
            "end, peer": statistics.fmean(pair[1] for pair in last),
            f"largest difference, {min(COMPARED, len(self.losses))} steps": self.difference,
            "the same after one rounding": _text(self.rounding),
            "weights": self.weights,
            "average": _text(self.average),
            "images/CPU s, megavis": self.batch_size / statistics.median(ours),
            "images/CPU s, peer": self.batch_size / statistics.median(theirs),
            "peer's time / megavis'": ratio(theirs, ours),
        }


class Ours:
    """megavis in training, as `megavis train` sets it up."""

    def __init__(self, config: RunConfig, context: ParallelContext) -> None:
        self.objective = build_objective(config, context)
        self.engine = Engine(self.objective)

    @torch.no_grad()
    def start_from(self, weights: Weights) -> None:
        """Copy weights, all of which must be used, to the model."""
        left = dict(weights)
        for name, parameter in self.engine.layers.named_parameters():
            parameter.copy_(left.pop(name))
        assert not left, f"left over: {list(left)}"

    def step(self, batch: Batch, number: int) -> float:
        """Take one step and return its loss."""
        return float(self.engine.train_step(iter([batch]), number))

    def weights(self) -> Weights:
        """Return copies of the weights."""
        return {n: p.detach().clone() for n, p in self.engine.layers.named_parameters()}

    def average(self) -> Weights:
        """Return copies of the weights' moving average."""
        with self.engine.evaluated():
            return self.weights()


def batches(config: RunConfig, dataset: ShardDataset) -> Iterator[Batch]:
    """Yield the batches of a run on one process, in its order of samples."""
    with BatchLoader(
        dataset,
        seed=config.seed,
        micro_batch_size=config.training.batch_size,
        data_parallel_rank=0,
        data_parallel_size=1,
        accumulation_steps=1,
        threads=1,
    ) as loader:
        yield from loader


def compare(
    result: Result, ours: Ours, peers: Sequence[Peer], config: RunConfig, stream: Iterator[Batch]
) -> Result:
    """Train all for the config's steps, in alternating order, and fill in the result.

    Args:
        result: with its names.
        ours: megavis, with the weights of the first peer.
        peers: the peer, and optionally the peer after one rounding.
        config: of the run.
        stream: its batches.
    """
    steps = [ours.step, *(peer.step for peer in peers)]
    for number in range(config.training.steps):
        batch = next(stream)
        losses, seconds = [0.0] * len(steps), [0.0] * len(steps)
        places = range(len(steps))
        for place in places if number % 2 else reversed(places):
            # A thread's own seconds hardly depend on other load; the loader has its own threads.
            began = time.thread_time()
            losses[place] = steps[place](batch, number)
            seconds[place] = time.thread_time() - began
        result.losses.append(tuple(losses))
        result.seconds.append(tuple(seconds))
    result.weights = largest_difference(ours.weights(), peers[0].weights())
    if peers[0].average is not None:
        result.average = largest_difference(ours.average(), peers[0].average())
    return result


def _text(number: float | None) -> float | str:
    return "not measured" if number is None else number


def largest_difference(ours: Weights, theirs: Weights) -> float:
    """Return the largest difference of a number; both must have the same tensors."""
    assert ours.keys() == theirs.keys(), ours.keys() ^ theirs.keys()
    return max(float((ours[name] - theirs[name]).abs().max()) for name in ours)
