"""A part of stage 2: Transformer Engine's layers, and FP8, against plain kernels on one GPU."""

from __future__ import annotations

import torch

from benchmarks.gpu_check.models import job, plain_model, read_demo
from benchmarks.gpu_check.passes import BF16_GRADIENT, BF16_LOSS, Pass, differences, one_pass
from benchmarks.gpu_check.results import Row, Settings
from megavis.config.errors import UserError
from megavis.model.kernels import choose_kernels
from megavis.parallel.launch import Launch
from megavis.training.bench import random_batch

_DEMO = "gvp/demo.yaml"
_IMAGES = 16
"""FP8 needs matrices whose number of rows is a multiple of 16."""
_FP8_LOSS = 2.0**-4
"""Largest relative error of rounding a number to E4M3."""
_PLAIN = ("training.precision=bf16", "parallel.zero_stage=1", "training.kernels=torch")
_ENGINE = (*_PLAIN[:2], "training.kernels=transformer_engine")


def transformer_engine(launch: Launch, settings: Settings) -> list[Row]:
    """Compare a demo's loss and gradients in bf16 with those of `training.kernels: torch`."""
    name = "Transformer Engine"
    if not settings.on_gpu:
        return [Row(name, None, note="skipped: it needs a GPU")]
    try:
        choose_kernels("transformer_engine")
    except UserError as error:
        return [Row(name, None, note=f"skipped: {error}")]
    finally:
        choose_kernels("auto")
    plain = _pass(launch, settings, *_PLAIN)
    found = _pass(launch, settings, *_ENGINE)
    rows = differences(f"{name}: {_DEMO}, bf16", found, plain, (BF16_LOSS, BF16_GRADIENT))
    if torch.cuda.get_device_capability() < (8, 9):
        return [*rows, Row(f"{name}: FP8", None, note="skipped: this GPU has no FP8")]
    found = _pass(launch, settings, *_ENGINE, "training.fp8=true")
    loss, gradients = differences(f"{name}: {_DEMO}, FP8", found, plain, (_FP8_LOSS, float("inf")))
    # No tolerance of gradients is known; they indicate how noisy a step is.
    return [*rows, loss, Row(gradients.what, gradients.value, detail=gradients.detail)]


def _pass(launch: Launch, settings: Settings, *words: str) -> Pass:
    with job(launch, settings) as context:
        config = read_demo(_DEMO, settings.folder / "scratch" / "tokenizers", words)
        try:
            objective, stack = plain_model(config, context)
            stack.to(context.device, torch.bfloat16)
            batch = random_batch(objective, _IMAGES).to(context.device)
            return one_pass(objective, stack, batch)
        finally:
            choose_kernels("auto")
