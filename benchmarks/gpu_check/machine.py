"""Stage 1: versions, a real collective, the device's speed, SDPA's kernels, a run on the CPU."""

from __future__ import annotations

import math
import platform
import re
import time
from collections.abc import Mapping
from pathlib import Path

import torch
import torch.distributed as dist

from benchmarks.gpu_check.kernels import sdpa_kernels, seconds_of
from benchmarks.gpu_check.models import TINY, job, plain_model, read_config
from benchmarks.gpu_check.results import Measure, Row, Settings
from benchmarks.timing import machine
from megavis.commands.doctor import examine
from megavis.composition.trainable import SequenceBatch
from megavis.model.stack import LayerStack
from megavis.parallel.launch import Launch
from megavis.training.bench import processor_name, random_batch

# Visibility: config, overrides, and the kernel that torch's source selects on an H200 in bf16.
_VISIBILITIES: Mapping[str, tuple[str, tuple[str, ...], str]] = {
    "causal": ("igpt/xl_64.yaml", (), "cudnn_attention"),
    "causal, dropout 0.3": ("givt/causal_large.yaml", (), "flash_attention"),
    "causal, RoPE": ("darl/vit_h14_diff.yaml", (), "cudnn_attention"),
    "two streams": ("gvp/vit_b_p2p.yaml", (), "flex_attention"),
    "full": ("igpt/m_32.yaml", ("objective.mode=bert",), "cudnn_attention"),
    "context": ("mp3/vit_b_imagenet.yaml", (), "cudnn_attention"),
    "relative bias": (
        "mp3/vit_b_imagenet.yaml",
        ("model.positions=relative_2d", "finetune={num_classes: 10}", "data.validation=none"),
        "dense mask: efficient or cudnn",
    ),
}
SMALL_IMAGES: Mapping[str, tuple[str, ...]] = {
    "igpt/xl_64.yaml": ("data.image_size=8",),
    "igpt/l_32.yaml": ("data.image_size=8",),
    "igpt/m_32.yaml": ("data.image_size=8",),
    "givt/causal_large.yaml": ("data.image_size=64",),
    "darl/vit_h14_diff.yaml": ("data.image_size=28", "data.short_side=32"),
    "gvp/vit_b_p2p.yaml": ("data.image_size=32", "objective.num_groups=2", "data.short_side=36"),
    # Attention to four patches or fewer uses none of SDPA's kernels.
    "mp3/vit_b_imagenet.yaml": ("data.image_size=80", "data.short_side=90"),
}
"""Words that make a preset's images tiny."""


def facts(settings: Settings) -> dict[str, str]:
    """Return device, driver, processor, date and versions."""
    found = {"device": "cpu", "driver": "none", "processor": processor_name(), **machine()}
    if settings.on_gpu:
        found["device"] = torch.cuda.get_device_name()
        found["driver"] = _driver()
        found["CUDA"] = str(torch.version.cuda)
        found["NCCL"] = ".".join(map(str, torch.cuda.nccl.version()))
    return {**found, "system": platform.platform()}


def _driver() -> str:
    path = Path("/proc/driver/nvidia/version")
    version = re.search(r"\d+\.\d+(\.\d+)?", path.read_text()) if path.exists() else None
    return version[0] if version else "unknown"


def parts(settings: Settings) -> Mapping[str, Measure]:
    """Return the stage's parts; the last one uses the CPU even with a GPU."""
    return {
        "doctor": doctor,
        "all-reduce": all_reduce,
        "speed": speed,
        "SDPA kernels": attention_kernels,
        "CPU run": cpu_run,
    }


def doctor(launch: Launch, settings: Settings) -> list[Row]:
    """Return the findings of `megavis doctor`."""
    return [
        Row(
            f"doctor: {finding.name}",
            finding.found,
            aim="yes" if finding.required else "",
            passed=finding.found if finding.required else None,
            note=finding.detail,
        )
        for finding in examine()
    ]


def all_reduce(launch: Launch, settings: Settings) -> list[Row]:
    """Run an all-reduce and check its sum."""
    with job(launch, settings) as context:
        count = 1 << (10 if settings.small else 26)
        numbers = torch.ones(count, device=context.device)
        seconds = seconds_of(
            lambda: dist.all_reduce(numbers, group=context.world.group), context.device, rounds=3
        )
        right = bool((numbers == 1).all())
        backend = dist.get_backend()
    wanted = "nccl" if settings.on_gpu else "gloo"
    return [
        Row("all-reduce: backend", backend, aim=wanted, passed=backend == wanted),
        Row("all-reduce: sum is right", right, aim="yes", passed=right),
        Row(
            f"all-reduce: {4 * count / 1e6:.3g} MB",
            1e3 * seconds,
            "ms",
            note="one process: what a call costs, not what a link does",
        ),
    ]


def speed(launch: Launch, settings: Settings) -> list[Row]:
    """Measure large matrix products and copies, the bounds of all later measurements."""
    device = torch.device(settings.device)
    side, count = (64, 1 << 12) if settings.small else (8192, 1 << 30)
    rows = []
    for dtype, aim in ((torch.bfloat16, "650 assumed, 989 peak"), (torch.float32, "67 peak")):
        a, b = (torch.randn(side, side, device=device, dtype=dtype) for _ in range(2))
        seconds = seconds_of(lambda a=a, b=b: a @ b, device, rounds=10)  # type: ignore[misc]
        name = f"speed: products of {side}², {str(dtype).removeprefix('torch.')}"
        rows.append(Row(name, 2e-12 * side**3 / seconds, "TFLOP/s", aim))
    source = torch.empty(count, device=device)
    target = torch.empty_like(source)
    seconds = seconds_of(lambda: target.copy_(source), device, rounds=10)
    aim = "3,600 assumed; peak 3,350 (H100), 4,800 (H200)"
    return [*rows, Row("speed: copy in memory", 8e-9 * count / seconds, "GB/s", aim)]


def attention_kernels(launch: Launch, settings: Settings) -> list[Row]:
    """Return the SDPA kernel of each visibility and precision."""
    rows = []
    with job(launch, settings) as context:
        for name, (path, words, aim) in _VISIBILITIES.items():
            tiny = (*TINY, *SMALL_IMAGES[path]) if settings.small else ("model.num_layers=2",)
            config = read_config(path, [*tiny, *words])
            objective, stack = plain_model(config, context)
            stack.to(context.device)
            batch = random_batch(objective, 2).to(context.device)
            sequence = objective.training_sequence(batch)
            for dtype in (torch.bfloat16, torch.float32):
                stack.to(dtype)

                def run(sequence: SequenceBatch = sequence, stack: LayerStack = stack) -> None:
                    stack(sequence.inputs, sequence.targets).backward()

                run()  # compiles, which takes far longer under the profiler
                chosen = sdpa_kernels(run, context.device)
                is_sdpa = aim != "flex_attention"
                wanted = "efficient_attention" if is_sdpa and dtype == torch.float32 else aim
                precision = str(dtype).removeprefix("torch.")
                rows.append(
                    Row(
                        f"SDPA: {name}, {precision}",
                        ", ".join(chosen) or "none",
                        aim=wanted if settings.on_gpu else "",
                        passed=bool(chosen),
                        note="" if settings.on_gpu else "a CPU's kernel; a GPU chooses another",
                    )
                )
    return rows


def cpu_run(launch: Launch, settings: Settings) -> list[Row]:
    """Train a demo's model for three steps on the CPU, even with a GPU."""
    from benchmarks.gpu_check.training import Trainer

    cpu = Settings("cpu", settings.small, settings.folder)
    began = time.perf_counter()
    with job(launch, cpu) as context:
        config = read_config("igpt/demo.yaml", ["training.batch_size=2"])
        trainer = Trainer(config, context)
        losses = [trainer.step() for _ in range(3)]
    finite = all(map(math.isfinite, losses)) and losses[0] != losses[-1]
    seconds = time.perf_counter() - began
    note = "a GPU is here" if torch.cuda.is_available() else "no GPU is here"
    return [
        Row("CPU run: three steps, finite losses", finite, aim="yes", passed=finite, note=note),
        Row("CPU run: seconds", seconds, "s"),
    ]
