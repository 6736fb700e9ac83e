"""Counter-based random numbers as a function of seed, purpose and sample."""

import hashlib

import pytest
import torch

from megavis.parallel.random import derive_seed, normal, seeded, uniform

MASK = (1 << 64) - 1
GAMMA = 0x9E3779B97F4A7C15
FROZEN = [
    [9719065, 2819219, 203102, 5797956],
    [11629503, 7988896, 2965865, 2590137],
    [2528256, 13166106, 1108390, 5563946],
]
FROZEN_SEED = 4821714105096466594


def mix(bits):
    """SplitMix64's finalizer on Python integers."""
    bits = ((bits ^ (bits >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    bits = ((bits ^ (bits >> 27)) * 0x94D049BB133111EB) & MASK
    return bits ^ (bits >> 31)


def plain_uniform(index, count, seed, purpose):
    digest = hashlib.sha256(f"{seed}/{purpose}".encode()).digest()
    key = mix((index * GAMMA + int.from_bytes(digest[:8], "little")) & MASK)
    return [(mix((key + i * GAMMA) & MASK) >> 40) / 2**24 for i in range(count)]


@pytest.mark.parametrize("index", [0, 1, 12345, 2**40 + 7])
@pytest.mark.parametrize(("seed", "purpose"), [(0, "bert-mask"), (123456789, "noise")])
def test_uniform_matches_plain_loop(index, seed, purpose):
    draws = uniform(torch.tensor([index]), 20, seed=seed, purpose=purpose)
    assert draws.dtype == torch.float32
    assert draws[0].tolist() == plain_uniform(index, 20, seed, purpose)


def test_numbers_match_frozen_values():
    """Existing runs depend on these values: a change would alter their masks on resume."""
    draws = uniform(torch.tensor([0, 1, 1000000]), 4, seed=1, purpose="bert-mask")
    assert (draws * 2**24).to(torch.int64).tolist() == FROZEN
    assert derive_seed(1, "weights", "blocks.0") == FROZEN_SEED


def test_numbers_are_independent_of_the_batch():
    index = torch.arange(64)
    whole = uniform(index, 33, seed=3, purpose="mask")
    for sizes in ([1] * 64, [32, 32], [5, 59], [16] * 4):
        parts = [uniform(part, 33, seed=3, purpose="mask") for part in index.split(sizes)]
        assert torch.equal(torch.cat(parts), whole)
    shuffled = torch.randperm(64, generator=torch.Generator().manual_seed(0))
    assert torch.equal(uniform(index[shuffled], 33, seed=3, purpose="mask"), whole[shuffled])
    assert torch.equal(uniform(index, 7, seed=3, purpose="mask"), whole[:, :7])


def test_uniform_does_not_advance_torch_generators():
    torch.manual_seed(5)
    before = torch.get_rng_state()
    uniform(torch.arange(4), 4, seed=0, purpose="x")
    assert torch.equal(torch.get_rng_state(), before)


def test_numbers_are_uniform():
    draws = uniform(torch.arange(1000), 1000, seed=11, purpose="uniform").flatten()
    assert draws.min() >= 0
    assert draws.max() < 1
    counts = torch.histc(draws, bins=256, min=0, max=1)
    expected = len(draws) / 256
    chi_squared = float(((counts - expected) ** 2 / expected).sum())
    # 255 degrees of freedom: mean 255, standard deviation 22.6; allow five of them.
    assert 255 - 113 < chi_squared < 255 + 113


@pytest.mark.parametrize(
    "other",
    [
        {"seed": 1, "purpose": "a"},
        {"seed": 0, "purpose": "b"},
        {"seed": 0, "purpose": "a", "shift": 1},
        {"seed": 0, "purpose": "a", "roll": 1},
    ],
    ids=["seed", "purpose", "sample", "place"],
)
def test_streams_are_independent(other):
    """Neighbouring seeds, purposes, samples and positions are uncorrelated."""
    index = torch.arange(2000) + other.pop("shift", 0)
    roll = other.pop("roll", 0)
    one = uniform(torch.arange(2000), 500, seed=0, purpose="a")
    two = uniform(index, 500, **other).roll(roll, dims=1)
    pairs = torch.stack([one.flatten(), two.flatten()]).double()
    correlation = float(torch.corrcoef(pairs)[0, 1])
    assert abs(correlation) < 5 / (2000 * 500) ** 0.5
    assert float((one == two).double().mean()) < 1e-5


def test_derived_seeds_are_distinct():
    seeds = {derive_seed(s, *names) for s in (0, 1) for names in ((), ("a",), ("a", "b"), ("ab",))}
    assert len(seeds) == 8
    assert all(-(2**63) <= seed < 2**63 for seed in seeds)


def test_seeded_sets_and_restores_the_generator():
    torch.manual_seed(0)
    expected_after = torch.rand(3)
    torch.manual_seed(0)
    with seeded(7, "weights", "blocks.0"):
        first = torch.randn(4)
    assert torch.equal(torch.rand(3), expected_after)
    torch.rand(100)
    with seeded(7, "weights", "blocks.0"):
        assert torch.equal(torch.randn(4), first)
    with seeded(7, "weights", "blocks.1"):
        assert not torch.equal(torch.randn(4), first)


def test_normals_are_standard_and_independent_of_the_batch():
    index = torch.arange(2000)
    draws = normal(index, 50, seed=0, purpose="noise")
    probability = torch.distributions.Normal(0.0, 1.0).cdf(draws.flatten().double())
    ordered = probability.sort().values
    expected = (torch.arange(len(ordered)) + 0.5) / len(ordered)
    # Kolmogorov-Smirnov distance: p = 0.001 at 1.95 / sqrt(n).
    assert float((ordered - expected).abs().max()) < 1.95 / len(ordered) ** 0.5
    assert draws.isfinite().all()
    assert torch.equal(normal(index[7:9], 50, seed=0, purpose="noise"), draws[7:9])
