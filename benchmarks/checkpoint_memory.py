"""Memory of saving and loading: a process holds its share of a checkpoint and one or two tensors.

    python benchmarks/checkpoint_memory.py [WIDTH]

Trains a stand-in for iGPT-XL (60 blocks of a smaller width, default 192) for one step on four
processes under ZeRO-3, saves it as training does, and loads it into the same engine. Prints the
anonymous memory that each phase adds to a process, beyond its share of weights and moments; then
computes the largest share of iGPT-XL itself on 64 processes.
"""

from __future__ import annotations

import math
import sys
import tempfile
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.zero3_memory import WORDS, XL, resident

KINDS = 3
"""Weights and Adam's two moments."""


def phases(launch: Any, words: list[str], folder: str) -> dict[str, int]:
    """Return the memory of each phase on this process in bytes; a job for `WorkerPool`."""
    import torch

    from megavis.checkpoint.state.parameter_states import logical_shape
    from megavis.checkpoint.state.restore import load_training_state
    from megavis.checkpoint.state.save import Snapshot, TrainingProgress
    from megavis.config.load import load_config
    from megavis.data.loading.loader import Batch
    from megavis.papers import build_objective
    from megavis.parallel.context import close_context, open_context
    from megavis.training.engine import Engine

    config = load_config(XL, [*WORDS, *words]).config
    context = open_context(launch, device="cpu")
    objective = build_objective(config, context)
    engine = Engine(objective)
    ids = torch.randint(512, (1, objective.backbone.num_tokens))
    engine.train_step(iter([Batch(ids, torch.full((1,), -1), torch.arange(1))]), 0)
    parameters = [4 * logical_shape(p).numel() for _, p in engine.layers.named_parameters()]
    sizes = [size for size in parameters for _ in range(KINDS)]
    progress = TrainingProgress(step=1, samples_seen=1, seed=0, tokenizer=None)
    snapshot, copying = growth(lambda: Snapshot(Path(folder), progress, engine.states))
    _, writing = growth(snapshot.write)
    snapshot.publish()
    checkpoint = Path(folder) / "checkpoints" / "step-00000001"
    _, loading = growth(lambda: load_training_state(checkpoint, engine.states))
    close_context()
    share = shares(sizes, context.data.size)[context.data.rank]
    return {
        "share": share,
        "largest tensor": max(sizes),
        "copying": copying,
        "writing": writing,
        "loading": loading,
    }


def shares(sizes: Sequence[int], processes: int) -> list[int]:
    """Assign tensors as saving does, each to the process with the least so far; return sums."""
    load = [0] * processes
    for size in sizes:
        load[load.index(min(load))] += size
    return load


def growth(action: Callable[[], Any]) -> tuple[Any, int]:
    """Return the result of `action` and its peak of additional anonymous memory.

    Pages of mapped files are not counted, since the system can reclaim them.
    """
    before = resident("RssAnon")
    most, over = [before], threading.Event()

    def watch() -> None:
        while not over.wait(0.002):
            most.append(resident("RssAnon"))

    thread = threading.Thread(target=watch)
    thread.start()
    result = action()
    over.set()
    thread.join()
    return result, max(most) - before


def sizes_of_xl() -> list[int]:
    """Return the bytes of each of XL's weights and moments, in the order of saving."""
    from megavis.config.load import load_config
    from megavis.papers import build_objective
    from megavis.parallel.context import close_context, open_context
    from megavis.parallel.launch import read_launch
    from megavis.planning.parameters import count_parameters

    config = load_config(XL, []).config
    context = open_context(read_launch({}), device="cpu")
    matrices = count_parameters(build_objective(config, context))
    close_context()
    by_part: dict[str, list[int]] = {"embedding": [], "blocks": [], "head": []}
    for matrix in matrices:
        by_part[matrix.part].append(4 * math.prod(matrix.shape))
    parameters = [
        *by_part["embedding"],
        *config.model.num_layers * by_part["blocks"],
        *by_part["head"],
    ]
    return [size for size in parameters for _ in range(KINDS)]


def main() -> None:
    """Measure, compute and print."""
    from megavis.parallel.workers import WorkerPool

    width = sys.argv[1] if len(sys.argv) > 1 else "192"
    words = [f"model.hidden_size={width}", "model.num_attention_heads=4", "parallel.zero_stage=3"]
    with WorkerPool(4, quiet=True) as pool, tempfile.TemporaryDirectory() as folder:
        for rank, found in enumerate(pool.run(phases, 4, words, folder)):
            text = ", ".join(f"{name} {size / 1e6:.1f}" for name, size in found.items())
            print(f"rank {rank}, MB: {text}")
    sizes = sizes_of_xl()
    largest, mean = max(shares(sizes, 64)), sum(sizes) / 64
    print(
        f"iGPT-XL on 64 processes, GB: {mean / 1e9:.3f} per process on average, at most"
        f" {largest / 1e9:.3f}; largest tensor {max(sizes) / 1e9:.3f}"
    )


if __name__ == "__main__":
    main()
