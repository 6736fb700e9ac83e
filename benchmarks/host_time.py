"""Milliseconds of the host per block and micro-batch, on a CPU, for a preset of every paper.

    OMP_NUM_THREADS=1 python -m benchmarks.host_time [--papers igpt darl] [--json FILE]

On a GPU the host launches kernels one by one, and a step is no faster than that. Host time hardly
depends on the widths, so blocks are so narrow (32 channels, 2 heads, few tokens) that their
arithmetic on a CPU is negligible: what remains is Python, DeepSpeed and torch's dispatcher, and
small kernels in place of a GPU's launches. The time is the main thread's CPU time
(`time.thread_time`), which other jobs on the machine hardly affect. A step has one micro-batch of
one image; a block's time is the difference between two depths divided by the number of blocks
between them, which excludes the costs of a step that do not depend on depth. Blocks run eagerly, in
bf16, on one process; tensor parallelism needs more calls, which are not measured here.

`megavis plan` has the largest figure of each kind of block in `planning/host_time.py`.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.gpu_check.models import TINY, job, read_config
from benchmarks.gpu_check.results import Settings
from benchmarks.gpu_check.training import Trainer
from benchmarks.timing import parser, report
from megavis.commands.terminal import quietly
from megavis.config.schema import RunConfig
from megavis.parallel.launch import Launch, read_launch
from megavis.training.bench import processor_name

PRESETS: Mapping[str, tuple[str, ...]] = {
    "igpt/xl_64.yaml": ("data.image_size=8",),
    "givt/causal_large.yaml": ("data.image_size=64",),
    "givt/maskgit.yaml": ("data.image_size=64",),
    "darl/vit_h14_diff.yaml": ("data.image_size=28", "data.short_side=32"),
    "gvp/vit_b_p2p.yaml": ("data.image_size=32", "objective.num_groups=2", "data.short_side=36"),
    "mp3/vit_b_imagenet.yaml": ("data.image_size=80", "data.short_side=90"),
    "mae/vit_b16.yaml": ("data.image_size=64", "data.short_side=72"),
}
"""A preset of each paper, with words that make its images small."""

STAGES, DEPTHS = (1, 3), (2, 8)


def block_milliseconds(
    preset: str, stage: int, *, rounds: int, launch: Launch, depths: tuple[int, int] = DEPTHS
) -> float:
    """Return the main thread's milliseconds per block.

    Two models of different depth take steps in turn, so that other load on the machine affects
    both; the result is the median of the rounds' differences for each block.

    Args:
        preset: path in `yaml_configs`; one of `PRESETS`.
        stage: ZeRO stage.
        rounds: timed steps of each depth.
        launch: launch of this process.
        depths: numbers of blocks of the two models.
    """
    settings = Settings(device="cpu", small=True, folder=Path())
    with quietly(), job(launch, settings) as context:
        fewer, more = (Trainer(_config(preset, stage, depth), context) for depth in depths)
        for _ in range(3):
            _step_seconds(fewer)
            _step_seconds(more)
        taken = [_step_seconds(more) - _step_seconds(fewer) for _ in range(rounds)]
    return 1e3 * statistics.median(taken) / (depths[1] - depths[0])


def _config(preset: str, stage: int, depth: int) -> RunConfig:
    words = (
        *TINY,
        *PRESETS[preset],
        "training.batch_size=1",
        "training.micro_batch_size=1",
        "training.precision=bf16",
        "parallel.activation_checkpointing=none",
        f"parallel.zero_stage={stage}",
        f"model.num_layers={depth}",
    )
    return read_config(preset, words)


def _step_seconds(trainer: Trainer) -> float:
    began = time.thread_time()
    trainer.enqueue()
    return time.thread_time() - began


def main(words: Sequence[str] | None = None) -> None:
    """Measure and print a table."""
    made = parser(__doc__ or "")
    papers = sorted({preset.partition("/")[0] for preset in PRESETS})
    made.add_argument("--papers", nargs="+", choices=papers, default=papers, help="default: all")
    args = made.parse_args(words)
    rows: list[dict[str, Any]] = []
    for preset in PRESETS:
        if preset.partition("/")[0] in args.papers:
            row: dict[str, Any] = {"preset": preset}
            for stage in STAGES:
                launch = read_launch({})
                found = block_milliseconds(preset, stage, rounds=args.rounds, launch=launch)
                row[f"ZeRO-{stage}"] = found
            rows.append(row)
            print(*row.values(), flush=True)
    report(rows, args.json, unit="ms per block", processor=processor_name())


if __name__ == "__main__":
    main()
