"""Memory while a stand-in for iGPT-XL is built: under ZeRO-3 no process holds the full model.

    python benchmarks/zero3_memory.py [WIDTH]

Builds XL's 60 blocks with a smaller width (default 192) on four processes, once under
ZeRO-1 and once under ZeRO-3, then takes one step on random images. Prints the resident memory that
each phase adds to a process, as a multiple of the model's float32 weights.
"""

from __future__ import annotations

import ctypes
import gc
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

XL = Path(__file__).parents[1] / "yaml_configs/igpt/xl_64.yaml"
M_MMAP_THRESHOLD = -3  # as <malloc.h> has it
WORDS = ["data.image_size=16", "training.precision=float32", "training.batch_size=4"]


@dataclass(frozen=True)
class Growth:
    """Additional resident bytes on one process.

    Attributes:
        model: bytes of the model's float32 weights.
        largest_layer: bytes of the float32 weights of its largest layer.
        peak: peak while the layers were built.
        built: bytes after they were built.
        engine: bytes after the engine allocated master weights and gradients.
        trained: bytes after the first step, which allocates Adam's moments and activations.
    """

    model: int
    largest_layer: int
    peak: int
    built: int
    engine: int
    trained: int


def growth(launch: Any, words: list[str], trains: bool = True) -> Growth:
    """Build the layers, then the whole engine, and take a step; a job for `WorkerPool`.

    Args:
        launch: this process's place in the job.
        words: keys of XL's config to change.
        trains: whether to build the engine and train; otherwise 0 is returned for these.
    """
    from megavis.config.load import load_config
    from megavis.papers import OBJECTIVES
    from megavis.parallel.context import close_context, open_context
    from megavis.training.engine import build_stack

    config = load_config(XL, [*WORDS, *words]).config
    context = open_context(launch, device="cpu")
    objective = OBJECTIVES[config.objective.name](config, context)
    first, block, last = (bytes_of(plan) for plan in layers_of(objective))
    # Warm up: the first use of collectives and libraries allocates memory permanently.
    small = config.model_copy(update={"model": config.model.model_copy(update={"num_layers": 1})})
    build_stack(type(objective)(small, context))
    layers, peak, built = measured(lambda: build_stack(objective))
    del layers
    engine, trained = train(objective, context) if trains else (0, 0)
    close_context()
    model = first + config.model.num_layers * block + last
    return Growth(model, max(first, block, last), peak, built, engine, trained)


def train(objective: Any, context: Any) -> tuple[int, int]:
    """Return the additional resident bytes of an engine, before and after a step."""
    import torch

    from megavis.data.loading.loader import Batch
    from megavis.training.engine import Engine

    engine, _, initialized = measured(lambda: Engine(objective))
    ids = torch.randint(512, (1, objective.num_tokens))
    batch = Batch(ids, torch.full((1,), -1), torch.arange(1))
    _, _, stepped = measured(lambda: engine.train_step(iter([batch]), 0))
    return initialized, initialized + stepped


def bytes_of(plan: Any) -> int:
    """Return the bytes of a layer's float32 weights."""
    return sum(4 * parameter.numel() for parameter in plan.build().parameters())


def layers_of(objective: Any) -> list[Any]:
    """Return the plans of embedding, first block and head."""
    plans = objective.layer_plans()
    return [plans[0], plans[1], plans[-1]]


def measured(action: Any) -> tuple[Any, int, int]:
    """Return the result of `action`, and its additional resident bytes: peak and final."""
    libc = ctypes.CDLL(None)
    # Return freed memory to the system at once, so that resident memory is memory in use.
    libc.mallopt(M_MMAP_THRESHOLD, 65536)
    gc.collect()
    libc.malloc_trim(0)
    before = resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    result = action()
    gc.collect()
    libc.malloc_trim(0)
    return result, resident("VmHWM") - before, resident("VmRSS") - before


def resident(field: str) -> int:
    """Return this process's `VmRSS` or its peak `VmHWM` in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    raise OSError(f"/proc/self/status holds no {field}")


def main() -> None:
    """Measure both stages and print a table."""
    from megavis.parallel.workers import WorkerPool

    width = sys.argv[1] if len(sys.argv) > 1 else "192"
    words = [f"model.hidden_size={width}", "model.num_attention_heads=4"]
    with WorkerPool(4, quiet=True) as pool:
        for stage in (1, 3):
            results = pool.run(growth, 4, [*words, f"parallel.zero_stage={stage}"])
            worst = max(results, key=lambda result: result.peak)
            ratios = (worst.peak, worst.built, worst.engine, worst.trained)
            peak, built, engine, trained = (size / worst.model for size in ratios)
            print(
                f"ZeRO-{stage}, 4 processes, model {worst.model / 1e6:.0f} MB, largest layer"
                f" {worst.largest_layer / worst.model:.3f}: while built at most {peak:.2f}, built"
                f" {built:.2f}, with its engine {engine:.2f}, after a step {trained:.2f}"
            )


if __name__ == "__main__":
    main()
