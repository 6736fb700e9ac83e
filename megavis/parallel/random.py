"""Random numbers that are a function of seed, sample and purpose, on any device and layout.

A mask or a noise vector drawn here depends on which sample it is for and on nothing else: not on
the rank, the micro-batch, or what was drawn before. So every layout draws the same numbers, a
resumed run needs no generator state, and nothing waits for the host.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
from collections.abc import Iterator

import torch
from torch import Tensor

# Multipliers of SplitMix64 (Steele, Lea, Flood, "Fast Splittable Pseudorandom Number Generators"),
# as signed 64-bit integers.
_GAMMA = 0x9E3779B97F4A7C15 - (1 << 64)
_MIX_1 = 0xBF58476D1CE4E5B9 - (1 << 64)
_MIX_2 = 0x94D049BB133111EB - (1 << 64)


def uniform(sample_index: Tensor, count: int, *, seed: int, purpose: str, first: int = 0) -> Tensor:
    """Draw `count` numbers in [0, 1) for each sample.

    Args:
        sample_index: int64 `[b]`, the position of each sample in the endless stream.
        count: numbers a sample.
        seed: the run's seed.
        purpose: what the numbers are for; different purposes are independent.
        first: which of a sample's numbers is the first; those before it are left out.

    Returns:
        float32 `[b, count]`, multiples of 2^-24.
    """
    counter = torch.arange(first, first + count, device=sample_index.device, dtype=torch.int64)
    key = _mix(sample_index.to(torch.int64) * _GAMMA + derive_seed(seed, purpose))
    bits = _mix(key[:, None] + counter * _GAMMA)
    return _shift(bits, 40).to(torch.float32) * 2.0**-24


def normal(sample_index: Tensor, count: int, *, seed: int, purpose: str) -> Tensor:
    """Draw `count` standard normals for each sample; arguments as `uniform` has them.

    By the transform of Box and Muller (1958) from two uniform numbers each, within ±5.8.

    Returns:
        float32 `[b, count]`.
    """
    draws = uniform(sample_index, 2 * count, seed=seed, purpose=purpose)
    # The radius needs (0, 1], since log 0 is infinite.
    radius = torch.sqrt(-2.0 * torch.log(1.0 - draws[:, :count]))
    return radius * torch.cos((2.0 * math.pi) * draws[:, count:])


def derive_seed(seed: int, *names: object) -> int:
    """Return a signed 64-bit seed for a named use of the run's seed."""
    text = "/".join(str(part) for part in (seed, *names))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little", signed=True)


@contextlib.contextmanager
def seeded(seed: int, *names: object) -> Iterator[None]:
    """Seed the CPU's global generator inside the block and restore it after it.

    Megatron and torch initialise weights from the global generator; a seed for each layer makes
    the weights independent of which process builds which layers. Weights are drawn on the CPU
    everywhere, so the generators of GPUs are left alone.
    """
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(derive_seed(seed, *names) & (2**63 - 1))
        yield


@contextlib.contextmanager
def rank_local_rng(rank: int, size: int) -> Iterator[None]:
    """Draw inside the block as no other process of a group does, and as before after it.

    Dropout on what every process of the tensor group holds must agree between them, dropout on
    what is split (heads, features of the MLP) must not. The processes share torch's generators;
    here each takes a seed of its own that depends on the CPU's. Activation checkpointing restores
    that one, and so repeats what was dropped.

    Args:
        rank: of this process in the group.
        size: of the group.
    """
    if size == 1:
        yield
        return
    # On the CPU, so that nothing waits for the device.
    shared = int(torch.randint(2**62, (), device="cpu"))
    # On a CPU the current device is no index (`select_device`), and CUDA's generators are not used.
    device = torch.cuda.current_device() if torch.cuda.is_initialized() else None
    with torch.random.fork_rng([device] if isinstance(device, int) else []):
        torch.manual_seed(derive_seed(shared, "tensor", rank) & (2**63 - 1))
        yield


def _mix(bits: Tensor) -> Tensor:
    bits = (bits ^ _shift(bits, 30)) * _MIX_1
    bits = (bits ^ _shift(bits, 27)) * _MIX_2
    return bits ^ _shift(bits, 31)


def _shift(bits: Tensor, places: int) -> Tensor:
    """Shift right and fill with zeros; torch's own shift keeps the sign."""
    return (bits >> places) & ((1 << (64 - places)) - 1)
