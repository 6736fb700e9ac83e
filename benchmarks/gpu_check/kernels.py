"""Evaluate profiles: attention kernels, and the time of a step by kind of kernel."""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

_SDPA = re.compile(r"aten::_scaled_dot_product_(?!.*backward)(\w+)")
# Inductor generates FlexAttention from a template.
_FLEX = re.compile(r"flex_attention|triton_tem_")
_ATTENTION = re.compile(rf"flash|fmha|sdpa|attention|{_FLEX.pattern}", re.IGNORECASE)
_PRODUCTS = re.compile(
    r"gemm|gemv|nvjet|cutlass|xmma|split_?k|wgrad|dgrad|conv"
    r"|aten::(add|badd)?b?mm\b|aten::addmv|mkldnn.*linear|_linear_pointwise",
    re.IGNORECASE,
)
_SHOWN = 12


@dataclass(frozen=True)
class Kernel:
    """A kernel's interval on the device, in microseconds."""

    name: str
    start: float
    end: float


@dataclass(frozen=True)
class TimeSplit:
    """Milliseconds of a run by kind of work on the device.

    Attributes:
        products: matrix products and convolutions.
        attention: SDPA.
        rest: all other kernels and copies.
        busy: time with any kernel; None on a CPU, where it is unknown.
        longest: kernels or operators with the most time, in milliseconds.
    """

    products: float
    attention: float
    rest: float
    busy: float | None
    longest: dict[str, float]


def class_of(name: str) -> str:
    """Return `products`, `attention` or `rest` for the name of a kernel or operator."""
    if _ATTENTION.search(name):
        return "attention"
    return "products" if _PRODUCTS.search(name) else "rest"


def synchronize(device: torch.device) -> None:
    """Synchronize with the device; a no-op on a CPU."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def profiled(run: Callable[[], object], device: torch.device) -> Any:
    """Return torch's profile of a run."""
    activities = [ProfilerActivity.CPU]
    if device.type == "cuda":
        activities.append(ProfilerActivity.CUDA)
    with profile(activities=activities) as found:
        run()
        synchronize(device)
    return found


def sdpa_kernels(run: Callable[[], object], device: torch.device) -> list[str]:
    """Return the SDPA kernels of a run: `flash_attention`, `cudnn_attention`, ...

    FlexAttention, which is not SDPA, is listed as `flex_attention`.
    """
    names = [event.key for event in profiled(run, device).key_averages()]
    found = {match[1] for name in names if (match := _SDPA.fullmatch(name))}
    return sorted(found | {"flex_attention" for name in names if _FLEX.search(name)})


def time_split(run: Callable[[], object], device: torch.device, *, times: int) -> TimeSplit:
    """Return the time of a run by kind of work, averaged over `times` runs."""

    def all_of_them() -> None:
        for _ in range(times):
            run()

    found = profiled(all_of_them, device)
    if device.type == "cuda":
        # Exclude named ranges (the optimizer's step), which are listed like kernels.
        return split_of_kernels(
            (
                Kernel(event.name, event.time_range.start, event.time_range.end)
                for event in found.events()
                if event.device_type == DeviceType.CUDA and not event.is_user_annotation
            ),
            times=times,
        )
    taken = Counter[str]()
    for event in found.key_averages():
        taken[event.key] += event.self_cpu_time_total
    return _split(taken, busy=None, times=times)


def split_of_kernels(kernels: Iterable[Kernel], *, times: int) -> TimeSplit:
    """Return the split of kernels on one device."""
    taken, busy, end = Counter[str](), 0.0, None
    for kernel in sorted(kernels, key=lambda kernel: kernel.start):
        taken[kernel.name] += kernel.end - kernel.start  # type: ignore[assignment]
        free = kernel.start if end is None else max(kernel.start, end)
        busy += max(kernel.end - free, 0.0)
        end = kernel.end if end is None else max(end, kernel.end)
    return _split(taken, busy=busy, times=times)


def _split(taken: Counter[str], *, busy: float | None, times: int) -> TimeSplit:
    scale = 1e-3 / times  # microseconds of all runs to milliseconds of one
    classes: Counter[str] = Counter()
    for name, microseconds in taken.items():
        classes[class_of(name)] += microseconds
    return TimeSplit(
        products=scale * classes["products"],
        attention=scale * classes["attention"],
        rest=scale * classes["rest"],
        busy=None if busy is None else scale * busy,
        longest={name[:80]: scale * most for name, most in taken.most_common(_SHOWN)},
    )


def seconds_of(run: Callable[[], object], device: torch.device, *, rounds: int) -> float:
    """Return the mean seconds of a run including synchronization, without the first one."""
    run()
    synchronize(device)
    began = time.perf_counter()
    for _ in range(rounds):
        run()
    synchronize(device)
    return (time.perf_counter() - began) / rounds
