"""Stage 6: speed of generating ids: batch 1, 16 and 64, float32, bf16, and as a CUDA graph."""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu_check.kernels import seconds_of, synchronize
from benchmarks.gpu_check.machine import SMALL_IMAGES, speed
from benchmarks.gpu_check.models import TINY, job, plain_model, read_config
from benchmarks.gpu_check.results import Row, Settings
from benchmarks.gpu_check.stages import Measure
from megavis.model.inference import Inference
from megavis.model.kernels import decoding_kernels
from megavis.model.stack import LocalLayers
from megavis.papers.igpt.paper import IGPT
from megavis.parallel.launch import Launch
from megavis.sampling.sampler import Sampler
from megavis.schedules.one_by_one import OneByOne
from megavis.schedules.schedule import Question

PRESET = "igpt/l_32.yaml"
Way = Callable[[Inference, IGPT, int, Settings], float]
"""Returns the seconds per id for a batch of images."""

_BATCHES = (1, 16, 64)
_BANDWIDTH = "speed: copy in memory"


def parts(settings: Settings) -> Mapping[str, Measure]:
    """Return the stage's parts."""
    dtypes = {"float32": torch.float32, "bf16": torch.bfloat16}
    ways = {"": seconds_a_place, ", CUDA graph": graphed_place}
    return {
        f"{name}{way}": functools.partial(_decode, f"{name}{way}", dtype, measure)
        for way, measure in ways.items()
        for name, dtype in dtypes.items()
    }


def _decode(
    name: str, dtype: torch.dtype, measure: Way, launch: Launch, settings: Settings
) -> list[Row]:
    tiny = (*TINY, *SMALL_IMAGES[PRESET]) if settings.small else ()
    with job(launch, settings) as context:
        bandwidth = next(row for row in speed(launch, settings) if row.what == _BANDWIDTH)
        objective, stack = plain_model(read_config(PRESET, tiny), context)
        assert isinstance(objective, IGPT)
        stack.to(device=context.device, dtype=dtype)
        num_bytes = sum(p.numel() * p.element_size() for p in stack.parameters())
        runner = Inference(LocalLayers(objective.layer_plans(), list(stack.layers)), context)
        rows = []
        for batch in (1, 2) if settings.small else _BATCHES:
            seconds = measure(runner, objective, batch, settings)
            # In GB/s like the bandwidth: all weights are read once per position.
            share = 1e-9 * num_bytes / seconds / float(bandwidth.value or 0.0)
            note = _note(settings) if measure is graphed_place else ""
            rows += _rows(f"decoding iGPT-L, {name}, batch {batch}", seconds, batch, share, note)
    return rows


def _note(settings: Settings) -> str:
    if settings.on_gpu:
        return "one place again and again, without the choice of an id"
    return "no GPU: the same pass without a graph"


def _rows(title: str, seconds: float, batch: int, share: float, note: str) -> list[Row]:
    return [
        Row(f"{title}: a token", 1e3 * seconds, "ms", note=note),
        Row(f"{title}: rate", batch / seconds, "tokens/s"),
        Row(
            f"{title}: weights read, of the measured bandwidth",
            100 * share,
            "%",
            "82 (gpt-fast)" if batch == 1 else "",
        ),
    ]


def seconds_a_place(runner: Inference, objective: IGPT, batch: int, settings: Settings) -> float:
    """Return the seconds per id for the whole batch, without the prefill pass."""
    places = 4 if settings.small else 64
    device = runner.context.device
    num_given = objective.num_tokens - places - 1
    given = torch.zeros(batch, num_given, dtype=torch.int64, device=device)
    taken = []
    for _ in range(2 if settings.small else 4):
        watched = AfterFirstPass(runner.layers, runner.context)
        Sampler(watched, objective, Path()).tokens(torch.arange(batch), given=given)
        synchronize(device)
        taken.append((time.perf_counter() - watched.began) / places)
    return statistics.median(taken[1:])


class AfterFirstPass(Inference):
    """A runner that records the end of its first pass, the prefill.

    Attributes:
        began: time in seconds; 0 before.
    """

    began = 0.0

    def predictions(self, *arguments: Any, **options: Any) -> Any:
        """Return the head's output."""
        found = super().predictions(*arguments, **options)
        if not self.began:
            synchronize(self.context.device)
            self.began = time.perf_counter()
        return found


@torch.no_grad()
def graphed_place(runner: Inference, objective: IGPT, batch: int, settings: Settings) -> float:
    """Return the seconds per position as a CUDA graph, without the host's work."""
    device, given = runner.context.device, objective.num_tokens // 2
    ids = torch.zeros(batch, objective.num_tokens, dtype=torch.int64, device=device)
    cache = runner.cache(objective.num_tokens)
    plan = OneByOne.along(torch.arange(objective.num_tokens, device=device)[None])

    def inputs_at(place: int, since: int) -> tuple[Tensor, ...]:
        question = Question(plan, place, slice(place, place + 1))
        return objective.rows(ids, question, (), since)

    runner.predictions(inputs_at(given - 1, 0), cache=cache)
    inputs = inputs_at(given, given)

    def place() -> object:
        with decoding_kernels(device):
            return runner.predictions(inputs, cache=cache)

    rounds = 2 if settings.small else 20
    if not settings.on_gpu:
        return seconds_of(place, device, rounds=rounds)
    # Warm up on a side stream, as before any capture, which must not run ahead of the inputs.
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            place()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        place()
    return seconds_of(graph.replay, device, rounds=rounds)
