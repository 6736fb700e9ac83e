"""Stage 6: speed of generating ids: batch 1, 16 and 64, float32, bf16, with CUDA graphs."""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu_check.kernels import synchronize
from benchmarks.gpu_check.machine import SMALL_IMAGES, speed
from benchmarks.gpu_check.models import TINY, job, plain_model, read_config
from benchmarks.gpu_check.results import Row, Settings
from benchmarks.gpu_check.stages import Measure
from megavis.model.inference import Inference
from megavis.model.stack import LocalLayers
from megavis.papers.igpt.paper import IGPT
from megavis.parallel.launch import Launch
from megavis.sampling.sampler import Sampler

PRESET = "igpt/l_32.yaml"
_BATCHES = (1, 16, 64)
_BANDWIDTH = "speed: copy in memory"
_NOTES = {True: "with the capture", False: "no GPU: the same steps without a graph"}


def parts(settings: Settings) -> Mapping[str, Measure]:
    """Return the stage's parts."""
    dtypes = {"float32": torch.float32, "bf16": torch.bfloat16}
    ways = {"": False, ", CUDA graphs": True}
    return {
        f"{name}{way}": functools.partial(_decode, f"{name}{way}", dtype, static)
        for way, static in ways.items()
        for name, dtype in dtypes.items()
    }


def _decode(
    name: str, dtype: torch.dtype, static: bool, launch: Launch, settings: Settings
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
            seconds = seconds_a_place(runner, objective, batch, settings, static=static)
            # In GB/s like the bandwidth: all weights are read once per position.
            share = 1e-9 * num_bytes / seconds / float(bandwidth.value or 0.0)
            note = _NOTES[settings.on_gpu] if static else ""
            rows += _rows(f"decoding iGPT-L, {name}, batch {batch}", seconds, batch, share, note)
    return rows


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


def seconds_a_place(
    runner: Inference, objective: IGPT, batch: int, settings: Settings, *, static: bool
) -> float:
    """Return the seconds per id for the whole batch, without the prefill pass."""
    places = 4 if settings.small else 64
    device = runner.context.device
    num_given = objective.num_tokens - places - 1
    given = torch.zeros(batch, num_given, dtype=torch.int64, device=device)
    taken = []
    for _ in range(2 if settings.small else 4):
        watched = AfterFirstPass(runner.layers, runner.context)
        Sampler(watched, objective, Path()).tokens(torch.arange(batch), given=given, static=static)
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
