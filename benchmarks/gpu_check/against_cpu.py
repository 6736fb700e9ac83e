"""Stage 2: losses and gradients of every demo on the CPU and on the GPU; random numbers; dropout.

Without a GPU the second pass runs on the CPU too, and must repeat the first one bit for bit.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping

import torch

from benchmarks.gpu_check.engine import transformer_engine
from benchmarks.gpu_check.models import DEMOS, job, plain_model, read_demo
from benchmarks.gpu_check.passes import (
    BF16_GRADIENT,
    BF16_LOSS,
    FLOAT32,
    compilation_row,
    differences,
    one_pass,
)
from benchmarks.gpu_check.results import Measure, Row, Settings
from megavis.model.core import Block
from megavis.model.kernels import compiles_blocks
from megavis.parallel.launch import Launch
from megavis.parallel.random import normal, uniform
from megavis.training.bench import random_batch

_DROPOUT = ("model.hidden_dropout=0.2", "model.attention_dropout=0.2", "model.mlp_dropout=0.2")


def parts(settings: Settings) -> Mapping[str, Measure]:
    """Return the stage's parts."""
    demos = {path: functools.partial(_compare_demo, path) for path in DEMOS}
    return {
        "random numbers": random_numbers,
        **demos,
        "recomputation": recomputation,
        "Transformer Engine": transformer_engine,
    }


def random_numbers(launch: Launch, settings: Settings) -> list[Row]:
    """Compare megavis's random numbers, which must be equal on every device."""
    index = torch.arange(64)
    drawn = [
        [draw(place, 1024, seed=3, purpose="check").cpu() for draw in (uniform, normal)]
        for place in (index, index.to(settings.device))
    ]
    same = torch.equal(drawn[0][0], drawn[1][0])
    difference = float((drawn[0][1] - drawn[1][1]).abs().max())
    note = _note(settings)
    return [
        Row("uniform: bit for bit as on the CPU", same, aim="yes", passed=same, note=note),
        Row("normal: largest difference", difference, aim="≤ 1e-5", passed=difference <= 1e-5),
    ]


def _compare_demo(path: str, launch: Launch, settings: Settings) -> list[Row]:
    rows = []
    with job(launch, settings) as context:
        config = read_demo(path, settings.folder / "scratch" / "tokenizers")
        config = config.model_copy(update={"model": config.model.without_dropout()})
        objective, stack = plain_model(config, context)
        batch = random_batch(objective, 2)
        reference = one_pass(objective, stack, batch)
        on_device = batch.to(context.device)
        stack.to(context.device)
        found = one_pass(objective, stack, on_device)
        limits = (FLOAT32, FLOAT32) if settings.on_gpu else (0.0, 0.0)
        rows += differences(f"{path}, float32", found, reference, limits, _note(settings))
        found = one_pass(objective, stack.to(torch.bfloat16), on_device)
        rows += differences(f"{path}, bf16", found, reference, (BF16_LOSS, BF16_GRADIENT))
        whole = any(isinstance(layer, Block) for layer in stack.modules())
        rows.append(compilation_row(path, whole=whole and compiles_blocks(context.device)))
    return rows


def recomputation(launch: Launch, settings: Settings) -> list[Row]:
    """Compare gradients with and without recomputation, under dropout."""
    found = {}
    for kind in ("none", "selective", "full"):
        words = (*_DROPOUT, f"parallel.activation_checkpointing={kind}")
        with job(launch, settings) as context:
            config = read_demo("igpt/demo.yaml", settings.folder, words)
            objective, stack = plain_model(config, context)
            stack.to(context.device)
            batch = random_batch(objective, 2).to(context.device)
            torch.manual_seed(7)
            found[kind] = one_pass(objective, stack, batch)
    rows = []
    for kind in ("selective", "full"):
        name = f"dropout under {kind} recomputation"
        rows += differences(name, found[kind], found["none"], (FLOAT32, FLOAT32))
    return rows


def _note(settings: Settings) -> str:
    return "" if settings.on_gpu else "no GPU: the CPU twice"
