"""Stage 4: forward and backward pass must not synchronize with the device.

On a CPU the passes run without a check, since torch's sync debug mode is for CUDA only.
"""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Callable, Iterator, Mapping

import torch

from benchmarks.gpu_check.machine import SMALL_IMAGES
from benchmarks.gpu_check.models import DEMOS, TINY, job, plain_model, read_demo
from benchmarks.gpu_check.results import Measure, Row, Settings
from benchmarks.gpu_check.training import Trainer
from megavis.parallel.launch import Launch
from megavis.training.bench import random_batch

_PRESETS = (
    "igpt/xl_64.yaml",
    "givt/causal_large.yaml",
    "darl/vit_h14_diff.yaml",
    "gvp/vit_b_p2p.yaml",
    "mp3/vit_b_imagenet.yaml",
)
# DeepSpeed's throughput timer, for example, waits from its third step on.
_BEFORE = 5
_NO_GPU = "no GPU: the passes ran, and waits are CUDA's"


def parts(settings: Settings) -> Mapping[str, Measure]:
    """Return the stage's parts."""
    models = {path: functools.partial(_look_at, path) for path in (*DEMOS, *_PRESETS)}
    return {**models, "DeepSpeed's step": engine_step}


def _look_at(path: str, launch: Launch, settings: Settings) -> list[Row]:
    words = (*TINY, *SMALL_IMAGES[path]) if path in SMALL_IMAGES else ()
    with job(launch, settings) as context:
        config = read_demo(path, settings.folder / "scratch" / "waits", words)
        objective, stack = plain_model(config, context)
        stack.to(context.device)
        batch = random_batch(objective, 2)
        if settings.on_gpu:
            batch = batch.pin_memory()

        def step() -> None:
            sent = batch.to(context.device, non_blocking=True)
            sequence = objective.training_sequence(sent)
            stack(sequence.inputs, sequence.targets).backward()

        step()  # warm-up: copies constants, chooses kernels
        refused = refused_wait(step, settings)
        places = waits(step, settings) if refused else []
    name = f"{path}: forward and backward wait for the device"
    if not settings.on_gpu:
        return [Row(name, None, aim="no", note=_NO_GPU)]
    detail = {"places": places}
    return [Row(name, bool(refused), "", "no", not refused, refused, detail)]


def engine_step(launch: Launch, settings: Settings) -> list[Row]:
    """Count the synchronizations in full steps of the engine, including DeepSpeed's."""
    rows = []
    for stage in (1, 3):
        words = [f"parallel.zero_stage={stage}", "training.batch_size=2"]
        with job(launch, settings) as context:
            config = read_demo("igpt/demo.yaml", settings.folder, words)
            trainer = Trainer(config, context)
            for _ in range(_BEFORE):
                trainer.step()
            places = waits(trainer.enqueue, settings)
        rows.append(
            Row(
                f"waits in a whole step, ZeRO-{stage}",
                len(places) if settings.on_gpu else None,
                note="DeepSpeed's own among them" if settings.on_gpu else _NO_GPU,
                detail={"places": places},
            )
        )
    return rows


def refused_wait(step: Callable[[], object], settings: Settings) -> str:
    """Return torch's message about the first synchronization in a step, or an empty string."""
    with _sync_debug_mode("error", settings):
        try:
            step()
        except RuntimeError as error:
            if "synchroniz" not in str(error):
                raise
            return str(error).splitlines()[0]
    return ""


def waits(step: Callable[[], object], settings: Settings) -> list[str]:
    """Return file and line of each synchronization in a step."""
    with warnings.catch_warnings(record=True) as caught, _sync_debug_mode("warn", settings):
        warnings.simplefilter("always")
        step()
    return [f"{w.filename}:{w.lineno}" for w in caught if "synchroniz" in str(w.message)]


@contextlib.contextmanager
def _sync_debug_mode(mode: str, settings: Settings) -> Iterator[None]:
    if not settings.on_gpu:
        yield
        return
    torch.cuda.set_sync_debug_mode(mode)
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")
