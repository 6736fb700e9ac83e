"""Counter-based random numbers: functions of seed, sample and purpose, on any device and layout.

A mask or noise vector does not depend on rank, micro-batch or earlier draws. Therefore all layouts
draw the same values, a resumed run needs no generator state, and draws never synchronize with the
host.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
from collections.abc import Iterator
from contextvars import ContextVar

import torch
from torch import Tensor

# Multipliers of SplitMix64 (Steele, Lea, Flood, "Fast Splittable Pseudorandom Number Generators"),
# as signed 64-bit integers.
_GAMMA = 0x9E3779B97F4A7C15 - (1 << 64)
_MIX_1 = 0xBF58476D1CE4E5B9 - (1 << 64)
_MIX_2 = 0x94D049BB133111EB - (1 << 64)


# Whether the processes of a tensor group draw different numbers, see `rank_local_rng`.
_APART: ContextVar[bool] = ContextVar("processes draw apart", default=False)


def uniform(sample_index: Tensor, count: int, *, seed: int, purpose: str, first: int = 0) -> Tensor:
    """Draw `count` uniform values in [0, 1) for each sample.

    Args:
        sample_index: int64 `[b]`, the position of each sample in the sample stream.
        count: values per sample.
        purpose: names the draws; different purposes are independent.
        first: index of the first value to return.

    Returns:
        float32 `[b, count]`, multiples of 2^-24.
    """
    counter = torch.arange(first, first + count, device=sample_index.device, dtype=torch.int64)
    # Mix twice: otherwise, keys of consecutive samples would start at neighbouring places of one
    # sequence.
    key = _mix(sample_index.to(torch.int64) * _GAMMA + derive_seed(seed, purpose))
    bits = _mix(key[:, None] + counter * _GAMMA)
    # 24 bits, which float32 holds exactly: more could round up to 1.
    return _shift(bits, 40).to(torch.float32) * 2.0**-24


def normal(sample_index: Tensor, count: int, *, seed: int, purpose: str) -> Tensor:
    """Draw `count` standard normal values for each sample; for the arguments see `uniform`.

    Uses the Box-Muller transform (1958), with two uniform draws per value; values are within ±5.8.

    Returns:
        float32 `[b, count]`.
    """
    draws = uniform(sample_index, 2 * count, seed=seed, purpose=purpose)
    # 1 - u is in (0, 1], so the logarithm is finite.
    radius = torch.sqrt(-2.0 * torch.log(1.0 - draws[:, :count]))
    return radius * torch.cos((2.0 * math.pi) * draws[:, count:])


def derive_seed(seed: int, *names: object) -> int:
    """Derive a signed 64-bit seed from the run's seed and a name."""
    text = "/".join(str(part) for part in (seed, *names))
    # Not `hash`, which Python seeds differently in each process.
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little", signed=True)


@contextlib.contextmanager
def seeded(seed: int, *names: object) -> Iterator[None]:
    """Seed torch's global CPU generator inside the block, and restore it afterwards.

    Megatron and torch initialise weights from the global generator; seeding it per layer makes the
    weights independent of which process builds which layers. Weights are always drawn on the CPU,
    so CUDA generators are not seeded.
    """
    with torch.random.fork_rng(devices=[]):
        # Not `torch.manual_seed`, which seeds CUDA's generators too and restores none of them.
        torch.default_generator.manual_seed(derive_seed(seed, *names) & (2**63 - 1))
        yield


@contextlib.contextmanager
def rank_local_rng(rank: int, size: int) -> Iterator[None]:
    """Use independent random numbers on each process of a group inside the block.

    Within a tensor group, dropout masks must agree on replicated activations and differ on
    partitioned ones (heads, features of the MLP). All processes seed torch's generators equally;
    inside the block each uses its own seed, derived from the CPU generator. Activation
    checkpointing restores that generator, and so repeats the dropout mask. Nested inside another
    such block, like the one around a whole Transformer block, it has no effect; nor does it while
    the compiler traces code to run there.
    """
    if size == 1 or torch.compiler.is_compiling() or _APART.get():
        yield
        return
    # On the CPU, to avoid synchronizing with the device.
    shared = int(torch.randint(2**62, (), device="cpu"))
    # Without CUDA the current device is not an index (`select_device`).
    device = torch.cuda.current_device() if torch.cuda.is_initialized() else None
    with torch.random.fork_rng([device] if isinstance(device, int) else []):
        torch.manual_seed(derive_seed(shared, "tensor", rank) & (2**63 - 1))
        token = _APART.set(True)
        try:
            yield
        finally:
            _APART.reset(token)


def _mix(bits: Tensor) -> Tensor:
    bits = (bits ^ _shift(bits, 30)) * _MIX_1
    bits = (bits ^ _shift(bits, 27)) * _MIX_2
    return bits ^ _shift(bits, 31)


def _shift(bits: Tensor, places: int) -> Tensor:
    """Logical right shift; torch's own is arithmetic."""
    return (bits >> places) & ((1 << (64 - places)) - 1)
