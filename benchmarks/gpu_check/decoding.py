"""Stage 6: generating ids: speed at batch 1, 16, 64, float32, bf16, CUDA graphs; largest batch."""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu_check.kernels import TimeSplit, synchronize, time_split
from benchmarks.gpu_check.machine import SMALL_IMAGES, speed
from benchmarks.gpu_check.models import TINY, job, plain_model, read_config
from benchmarks.gpu_check.results import Measure, Row, Settings
from megavis.composition.model import Model
from megavis.model.decoding import REACH
from megavis.model.inference import Inference
from megavis.model.stack import LocalLayers
from megavis.parallel.context import ParallelContext
from megavis.parallel.device import DTYPES
from megavis.parallel.launch import Launch
from megavis.sampling.batches import Batches
from megavis.sampling.sampler import Sampler

PRESET = "igpt/l_32.yaml"
_BATCHES = (1, 16, 64)
_BANDWIDTH = "speed: copy in memory"
_NOTES = {True: "with the capture", False: "no GPU: the same steps without a graph"}


def parts(settings: Settings) -> Mapping[str, Measure]:
    """Return the stage's parts."""
    ways = {"": False, ", CUDA graphs": True}
    speeds = {
        f"{name}{way}": functools.partial(_decode, f"{name}{way}", DTYPES[name], static)
        for way, static in ways.items()
        for name in ("float32", "bf16")
    }
    return {**speeds, "automatic batch": _automatic}


def _decode(
    name: str, dtype: torch.dtype, static: bool, launch: Launch, settings: Settings
) -> list[Row]:
    with job(launch, settings) as context:
        bandwidth = next(row for row in speed(launch, settings) if row.what == _BANDWIDTH)
        objective, inference = _model(dtype, context, settings)
        num_bytes = sum(
            p.numel() * p.element_size() for _, p in inference.layers.named_parameters()
        )
        rows = []
        for batch in (1, 2) if settings.small else _BATCHES:
            seconds, first = seconds_a_place(inference, objective, batch, settings, static=static)
            # In GB/s like the bandwidth: all weights are read once per position.
            share = 1e-9 * num_bytes / seconds / float(bandwidth.value or 0.0)
            title = f"decoding iGPT-L, {name}, batch {batch}"
            split = _split(inference, objective, batch, settings, static=static)
            rows += _rows(title, seconds, batch, share, split)
            note = _NOTES[settings.on_gpu] if static else ""
            rows.append(Row(f"{title}: once for a batch", first, "s", note=note))
    return rows


def _model(
    dtype: torch.dtype, context: ParallelContext, settings: Settings
) -> tuple[Model, Inference]:
    tiny = (*TINY, *SMALL_IMAGES[PRESET]) if settings.small else ()
    objective, stack = plain_model(read_config(PRESET, tiny), context)
    assert isinstance(objective, Model)
    stack.to(device=context.device, dtype=dtype)
    return objective, Inference(LocalLayers(objective.layer_plans(), list(stack.layers)), context)


def _automatic(launch: Launch, settings: Settings) -> list[Row]:
    with job(launch, settings) as context:
        objective, inference = _model(torch.bfloat16, context, settings)
        sampler = Sampler(inference, objective, Path())
        return batch_rows(sampler.batches(), sampler.tokens, 2 if settings.small else 4096)


def batch_rows(
    batches: Batches, draw: Callable[[torch.Tensor], torch.Tensor], num_images: int
) -> list[Row]:
    """Choose the largest batch for a number of images, generate it, and compare its memory."""
    size, title = batches.choose(draw, num_images), f"automatic batch of {num_images} images"
    if batches.memory is None:
        return [Row(title, size, "images", note="no GPU: 64 images, or all")]
    free = batches.memory.free()
    peak = batches.memory.peak_of(lambda: batches.run(draw, torch.arange(size)))
    share, fits = 100 * peak / free, batches.size == size
    used = share >= 50 or size == num_images
    return [
        Row(title, size, "images"),
        Row(f"{title}: fits", fits, aim="yes", passed=fits),
        Row(f"{title}: of the free memory", share, "%", "50 or more, or all images", used),
    ]


def _split(
    inference: Inference, objective: Model, batch: int, settings: Settings, *, static: bool
) -> TimeSplit:
    """Return the time of the ids and of the prefill pass before them by kind of kernel."""
    places = _places(settings)[1]
    given = objective.num_tokens - places - 1, batch
    return time_split(
        lambda: _seconds_behind_prefill(inference, objective, *given, static),
        inference.context.device,
        times=1,
    )


def _places(settings: Settings) -> tuple[int, int]:
    """Return two numbers of ids at the end of an image, inside one of decoding's graphs."""
    return (2, 4) if settings.small else (32, REACH - 32)


def _rows(title: str, seconds: float, batch: int, share: float, split: TimeSplit) -> list[Row]:
    return [
        Row(f"{title}: a token", 1e3 * seconds, "ms", detail={"split_ms": asdict(split)}),
        Row(f"{title}: rate", batch / seconds, "tokens/s"),
        Row(
            f"{title}: weights read, of the measured bandwidth",
            100 * share,
            "%",
            "82 (gpt-fast)" if batch == 1 else "",
        ),
    ]


def seconds_a_place(
    inference: Inference, objective: Model, batch: int, settings: Settings, *, static: bool
) -> tuple[float, float]:
    """Return the seconds per id for the whole batch, and those that a batch takes once.

    Times two lengths after the prefill pass, within one CUDA graph. Their difference is the cost
    of the ids alone; what remains is copying the weights and capturing the graph.
    """
    fewer, more = _places(settings)
    taken = {}
    for places in (fewer, more):
        given = objective.num_tokens - places - 1, batch
        runs = [_seconds_behind_prefill(inference, objective, *given, static) for _ in range(3)]
        taken[places] = statistics.median(runs[1:])
    seconds = (taken[more] - taken[fewer]) / (more - fewer)
    return seconds, taken[fewer] - fewer * seconds


def _seconds_behind_prefill(
    inference: Inference, objective: Model, num_given: int, batch: int, static: bool
) -> float:
    given = torch.zeros(batch, num_given, dtype=torch.int64, device=inference.context.device)
    watched = AfterFirstPass(inference.layers, inference.context)
    Sampler(watched, objective, Path()).tokens(torch.arange(batch), given=given, static=static)
    synchronize(inference.context.device)
    return time.perf_counter() - watched.began


class AfterFirstPass(Inference):
    """An `Inference` that records the end of its first pass, the prefill.

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
