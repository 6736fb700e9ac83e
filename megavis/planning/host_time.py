"""Time in which the host launches the kernels of a block, measured on a CPU or by `gpu_check`.

A step is no faster than its host, which launches kernels one by one, and gathers and frees weights
under ZeRO-3. `python -m benchmarks.host_time` measures it for each paper; a GPU's own machine is
measured by `python -m benchmarks.gpu_check`, whose folder `megavis plan --measured` reads.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megavis.config.errors import UserError
from megavis.config.papers import PAPER_CONFIGS
from megavis.data.format.files import from_json

MACHINE = "one core of an AMD EPYC, 2026-11-26"
"""Where the papers' `host_milliseconds` were measured, on eager blocks so narrow that their
arithmetic counts for little."""


def milliseconds() -> dict[str, tuple[float, float]]:
    """Return the figures of all papers that have some, by the objective's name."""
    found = {name: keys.host_milliseconds for name, keys in PAPER_CONFIGS.items()}
    return {name: both for name, both in found.items() if both is not None}


@dataclass(frozen=True)
class Measured:
    """What `gpu_check` has measured on a machine.

    Attributes:
        device: CUDA's name of the GPU.
        host: seconds of the host per block and micro-batch, by objective and ZeRO stage.
        bf16_tflops: speed of a large product in bf16; None if it was not measured.
        memory_gb_per_s: speed of a copy in memory, reading and writing; None likewise.
    """

    device: str
    host: Mapping[tuple[str, int], float] = field(default_factory=dict)
    bf16_tflops: float | None = None
    memory_gb_per_s: float | None = None


@dataclass(frozen=True)
class HostTime:
    """Seconds of the host per block and micro-batch, and a phrase that says how they are known."""

    seconds: float
    source: str


def host_time(objective: str, zero_stage: int, measured: Measured | None = None) -> HostTime:
    """Return the host's time for a block of an objective.

    A machine's own figure is used if there is one; for other objectives the figure of `MACHINE` is
    scaled by the median ratio of the two. ZeRO 0 and 2 count as ZeRO-1, whose blocks run alike.
    """
    stage = 3 if zero_stage == 3 else 1
    here = _shipped(objective, stage)
    if measured is None or not measured.host:
        return here
    if (objective, stage) in measured.host:
        return HostTime(measured.host[objective, stage], f"measured on this {measured.device}")
    ratios = [
        seconds / _shipped(name, each).seconds for (name, each), seconds in measured.host.items()
    ]
    ratio = statistics.median(ratios)
    return HostTime(
        ratio * here.seconds,
        f"assumed, {ratio:.2g} times {here.source}, the ratio of other models"
        f" on this {measured.device}",
    )


def _shipped(objective: str, stage: int) -> HostTime:
    all_papers = milliseconds()
    if objective in all_papers:
        own = all_papers[objective][stage == 3]
        return HostTime(1e-3 * own, f"measured on {MACHINE}, with no GPU")
    most = max(both[stage == 3] for both in all_papers.values())
    return HostTime(1e-3 * most, "assumed, the largest of all papers")


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
    name, host, speeds = "GPU", {}, {}
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
            if row["what"].startswith("host, ") and "objective" in detail:
                host[detail["objective"], detail["stage"]] = 1e-3 * row["value"]
            if row["what"].startswith("speed: "):
                speeds["bf16" if "bfloat16" in row["what"] else row["unit"]] = row["value"]
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
