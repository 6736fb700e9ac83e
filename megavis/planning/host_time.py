"""Time that the host takes to launch the kernels of a block, measured on a CPU or by `gpu_check`.

A step is no faster than its host, which launches kernels one by one, and gathers and frees weights
under ZeRO-3: all at once for a block with only hidden states, but module by module for one that
carries other tensors, such as coordinates, groups or noise (`Block.is_gathered_in_parts`).

`python -m benchmarks.host_time` measures it for each paper; `python -m benchmarks.gpu_check`
measures it on a machine with a GPU and writes a folder that `megavis plan --measured` reads.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megavis.config.errors import UserError
from megavis.data.format.files import from_json

MACHINE = "one core of an AMD EPYC, 2026-11-26"
"""Where `MILLISECONDS` were measured, on eager blocks so narrow that their arithmetic is
negligible."""
MILLISECONDS: Mapping[tuple[bool, int], float] = {
    (False, 1): 2.9,
    (False, 3): 5.6,
    (True, 1): 2.6,
    (True, 3): 8.9,
}
"""Per block and micro-batch, forward and backward, by whether blocks carry tensors and by ZeRO
stage: the largest of the papers' presets (docs/performance.md, "Host time per block")."""


@dataclass(frozen=True)
class Measured:
    """Measurements of `gpu_check` on a machine.

    Attributes:
        device: CUDA's name of the GPU.
        host: seconds of the host per block and micro-batch, keyed as `MILLISECONDS`.
        bf16_tflops: speed of a large product in bf16; None if it was not measured.
        memory_gb_per_s: speed of a copy in memory, reads and writes; None if it was not measured.
    """

    device: str
    host: Mapping[tuple[bool, int], float] = field(default_factory=dict)
    bf16_tflops: float | None = None
    memory_gb_per_s: float | None = None


@dataclass(frozen=True)
class HostTime:
    """Seconds of the host per block and micro-batch, and a phrase on their source."""

    seconds: float
    source: str


def host_time(*, carries: bool, zero_stage: int, measured: Measured | None = None) -> HostTime:
    """Return the host's time for a block; `carries`: with other tensors than hidden states.

    A machine's own figure is used if there is one; for other blocks and stages, the figure of
    `MACHINE` is scaled by the median ratio of the two machines. ZeRO 0 and 2 use ZeRO-1's figure,
    since their blocks run alike.
    """
    key = (carries, 3 if zero_stage == 3 else 1)
    shipped = 1e-3 * MILLISECONDS[key]
    if measured is None or not measured.host:
        return HostTime(shipped, f"measured on {MACHINE}, with no GPU")
    if key in measured.host:
        return HostTime(measured.host[key], f"measured on this {measured.device}")
    ratios = [seconds / (1e-3 * MILLISECONDS[each]) for each, seconds in measured.host.items()]
    ratio = statistics.median(ratios)
    return HostTime(
        ratio * shipped,
        f"assumed, {ratio:.2g} times measured on {MACHINE}, the ratio of other blocks"
        f" on this {measured.device}",
    )


def read_measured(folder: Path) -> Measured:
    """Return the figures of a folder that `python -m benchmarks.gpu_check` wrote.

    Raises:
        UserError: the folder has none, or none of a GPU at full size.
    """
    stages = {number: _stage(folder, number) for number in (1, 8)}
    if not any(stages.values()):
        raise UserError(
            f"--measured: {folder} holds neither stage-1.json nor stage-8.json; name the folder"
            " that python -m benchmarks.gpu_check has written, such as runs/gpu_check"
        )
    name, speeds = "GPU", {}
    blocks: dict[tuple[bool, int], list[float]] = {}
    for number, stage in stages.items():
        if not stage:
            continue
        if stage["device"] != "cuda" or stage["small"]:
            how = "with --small" if stage["small"] else "on a CPU"
            raise UserError(
                f"--measured: {folder}/stage-{number}.json was measured {how}; run"
                " python -m benchmarks.gpu_check on the GPU, without --small"
            )
        name = stage["facts"].get("device", name)
        for row in (row for part in stage["parts"].values() for row in part["rows"]):
            detail = row["detail"]
            if row["what"].startswith("host, "):
                blocks.setdefault((detail["carries"], detail["stage"]), []).append(row["value"])
            if row["what"].startswith("speed: "):
                speeds["bf16" if "bfloat16" in row["what"] else row["unit"]] = row["value"]
    host = {key: 1e-3 * max(found) for key, found in blocks.items()}
    return Measured(name, host, speeds.get("bf16"), speeds.get("GB/s"))


def _stage(folder: Path, number: int) -> dict[str, Any] | None:
    path = folder / f"stage-{number}.json"
    if not path.exists():
        return None
    try:
        stage: dict[str, Any] = from_json(path.read_text(encoding="utf-8"))
        for key in ("device", "small", "facts"):
            stage[key]
        for part in stage["parts"].values():
            for row in part["rows"]:
                _ = row["what"], row["value"], row["unit"], row["detail"]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(
            f"--measured: {path} is not a stage's file of benchmarks.gpu_check ({error})"
        ) from None
    return stage
