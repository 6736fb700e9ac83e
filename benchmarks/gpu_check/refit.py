"""Suggest constants of `megavis/planning` from the measurements."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence

from benchmarks.gpu_check.results import Row
from megavis.planning.devices import Device

# Parts of `StepTime.device`.
_DEVICE = ("products", "elementwise", "bubble", "communication", "optimizer")
_NOTE = "for megavis/planning; `megavis plan --measured FOLDER` uses host times and speeds"


def host_row(
    name: str,
    carries: bool,
    stage: int,
    depths: Sequence[int],
    measured: Sequence[float],
    planned: Sequence[float],
) -> Row:
    """Compare the host's time per block with the planner's, in milliseconds.

    Args:
        name: name of the preset.
        carries: whether its blocks carry tensors other than hidden states.
        stage: ZeRO stage.
        depths: numbers of blocks of two models.
        measured: seconds per step of each.
        planned: the planner's estimates.
    """
    blocks = depths[1] - depths[0]
    found, expected = (1e3 * (both[1] - both[0]) / blocks for both in (measured, planned))
    fixed = 1e3 * measured[0] - depths[0] * found
    return Row(
        f"host, {name}, ZeRO-{stage}: a block",
        found,
        "ms",
        f"{expected:.4g} planned",
        note=f"and {fixed:.3g} ms a step whatever the depth",
        detail={"carries": carries, "stage": stage, "planned_ms": expected, "fixed_ms": fixed},
    )


def suggestions(rows: Mapping[int, Sequence[Row]], device: Device | None) -> list[Row]:
    """Return suggested constants.

    Args:
        rows: rows of stages 1, 5 and 8.
        device: the planner's device of this GPU; None without a GPU.
    """
    return [*_host(rows[8]), *_shares(rows[1], device), *_steps(rows[5])]


def _host(rows: Sequence[Row]) -> list[Row]:
    """Suggest the host's time per block for each ZeRO stage: the median over presets."""
    found: dict[int, list[Row]] = {}
    for row in rows:
        if row.what.startswith("host, "):
            found.setdefault(int(row.detail["stage"]), []).append(row)
    return [
        Row(
            f"refit: host time of a block at ZeRO-{stage}",
            statistics.median(_number(row) for row in measured),
            "ms",
            f"{statistics.median(row.detail['planned_ms'] for row in measured):.4g} planned",
            note=_NOTE,
        )
        for stage, measured in sorted(found.items())
    ]


def _shares(rows: Sequence[Row], device: Device | None) -> list[Row]:
    """Compare the speeds of large products and copies with the planner's peaks."""
    if device is None:
        return []
    peaks = {
        "bfloat16": ("products, largest share", 1.0 * device.bf16_tflops),
        "copy": ("memory, largest share", 1.0 * device.memory_gb_per_s),
    }
    return [
        Row(f"refit: {name} of the peak", _number(row) / peak, note=f"{_NOTE}; {peak:g} {row.unit}")
        for key, (name, peak) in peaks.items()
        for row in rows
        if row.what.startswith("speed: ") and key in row.what
    ]


def _steps(rows: Sequence[Row]) -> list[Row]:
    """Compare each preset's step time, and two parts of it, with the plan."""
    found = []
    for row in rows:
        if row.what.endswith(": step"):
            planned, split = row.detail["planned_s"], row.detail["split_ms"]
            on_device = sum(planned[key] for key in _DEVICE)
            total = max(on_device, planned["host"])
            pairs = {
                "": (_number(row), total),
                ", products": (split["products"] + split["attention"], planned["products"]),
                ", the rest": (split["rest"], planned["elementwise"] + planned["optimizer"]),
            }
            name = row.what.removesuffix(": step")
            found += [_ratio(f"{name}{part}", *pair) for part, pair in pairs.items()]
    return found


def _ratio(name: str, measured: float, planned: float) -> Row:
    note = f"{measured:.4g} ms, {1e3 * planned:.4g} planned"
    return Row(f"refit: {name}: over planned", measured / (1e3 * planned), aim="1", note=note)


def _number(row: Row) -> float:
    assert isinstance(row.value, float | int)
    return float(row.value)
