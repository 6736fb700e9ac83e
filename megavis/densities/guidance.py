"""Density-based classifier-free guidance: draws from p(z | c)^(1+w) · p(z | ∅)^-w.

"GIVT: Generative Infinite-Vocabulary Transformers", section 3.4 and appendix D. Of a mixture, the
component is drawn from the conditional prediction; its Gaussians with and without the class are
then guided number by number, by rejection: proposals from N(μ_c, 2 · max(σ_c, σ_u)), a bound taken
over 1001 points in μ_c ± 10, at most 1000 tries, and where none is accepted a draw from the
conditional Gaussian.

Legend: m numbers to draw, all independent.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from megavis.model.gaussian_mixture import gaussian_log_prob
from megavis.parallel.random import normal, uniform

_REACH, _NUM_POINTS = 10.0, 1001
# Most numbers are found at once; for the few that are not, a round costs more than its tries, of
# which there are 1000 in all.
_ROUNDS = (16, 64, 256, 664)


@dataclass(frozen=True)
class Guided:
    """The unnormalised guided density of independent numbers.

    Attributes:
        mean: μ_c, `[...]`.
        log_scale: log σ_c, `[...]`.
        other_mean: μ_u of the prediction without the class, `[...]`.
        other_log_scale: log σ_u, `[...]`.
        weight: w, 0 or more; at 0 the conditional Gaussian is left.
    """

    mean: Tensor
    log_scale: Tensor
    other_mean: Tensor
    other_log_scale: Tensor
    weight: float

    def log_density(self, values: Tensor) -> Tensor:
        """Return (1 + w) log p(z | c) - w log p(z | ∅) at `values` `[...]`: float32 `[...]`."""
        conditional = gaussian_log_prob(values, self.mean, self.log_scale)
        other = gaussian_log_prob(values, self.other_mean, self.other_log_scale)
        return (1.0 + self.weight) * conditional - self.weight * other

    @property
    def proposal_log_scale(self) -> Tensor:
        """Logarithm of the proposal's scale, twice the larger of the two."""
        return torch.maximum(self.log_scale, self.other_log_scale) + math.log(2.0)

    def log_bound(self) -> Tensor:
        """Return log of max over the points of the density, divided by the proposal's mode.

        The log-density is a parabola. Over evenly spaced points its largest value is at one of
        the two next to the vertex, or at an end, so four points give the maximum over all 1001.
        """
        sharpness = (1.0 + self.weight) * torch.exp(-2.0 * self.log_scale)
        other = self.weight * torch.exp(-2.0 * self.other_log_scale)
        # Where the parabola has no top, its vertex is of no interest and an end is the largest.
        shift = other * (self.mean - self.other_mean) / (sharpness - other)
        step = 2.0 * _REACH / (_NUM_POINTS - 1)
        nearest = torch.floor(shift.nan_to_num(nan=0.0) / step)
        offsets = [nearest * step, (nearest + 1.0) * step]
        offsets += [torch.full_like(shift, -_REACH), torch.full_like(shift, _REACH)]
        points = torch.stack([o.clamp(-_REACH, _REACH) for o in offsets]) + self.mean
        highest = self.log_density(points).amax(0)
        return highest + self.proposal_log_scale + 0.5 * math.log(2.0 * math.pi)

    def select(self, rows: Tensor) -> Guided:
        """Return the densities of some of m numbers."""
        return self._map(lambda part: part[rows])

    def flatten(self) -> Guided:
        """Return the same with all dimensions in one."""
        return self._map(Tensor.flatten)

    def _map(self, change: Callable[[Tensor], Tensor]) -> Guided:
        parts = (self.mean, self.log_scale, self.other_mean, self.other_log_scale)
        mean, log_scale, other_mean, other_log_scale = map(change, parts)
        return Guided(mean, log_scale, other_mean, other_log_scale, self.weight)


def draw_guided(guided: Guided, keys: Tensor, *, seed: int, purpose: str) -> tuple[Tensor, Tensor]:
    """Draw one value of each guided density.

    The tries are made in a few rounds: on a CPU for those numbers alone that have none yet, on a
    GPU for all, since to know which have none would wait for the device. Values are the same.

    Args:
        guided: of m numbers, `[m]` each.
        keys: int64 `[m]`, which with `seed` and `purpose` decide the draw of each number.
        seed: decides every draw.
        purpose: what the draw is for.

    Returns:
        Values float32 `[m]`; and how rejection fared, int64 `[3]`: numbers wanted, numbers for
        which a proposal was accepted, proposals.
    """
    fallback = normal(keys, 1, seed=seed, purpose=f"{purpose}/fallback")[:, 0]
    values = guided.mean + guided.log_scale.exp() * fallback
    log_bound = guided.log_bound()
    counts = keys.new_zeros(3)
    counts[0] = len(keys)
    if keys.is_cuda:
        return _draw_for_all(guided, keys, values, counts, seed=seed, purpose=purpose)
    waiting = torch.arange(len(keys), device=keys.device)
    for tries in _ROUNDS:
        if not len(waiting):
            break
        part, name = guided.select(waiting), f"{purpose}/{tries}"
        noise = normal(keys[waiting], tries, seed=seed, purpose=f"{name}/value")
        heights = uniform(keys[waiting], tries, seed=seed, purpose=f"{name}/height")
        accepted, proposals = _try(part, log_bound[waiting], noise.t(), heights.t())
        hit, place = accepted.max(dim=0)
        values[waiting[hit]] = proposals.gather(0, place[None])[0][hit]
        tried = torch.where(hit, place + 1, tries)
        counts += torch.stack([counts.new_zeros(()), hit.sum(), tried.sum()])
        waiting = waiting[~hit]
    return values, counts


def _draw_for_all(
    guided: Guided, keys: Tensor, values: Tensor, counts: Tensor, *, seed: int, purpose: str
) -> tuple[Tensor, Tensor]:
    """Replace `values` `[m]` by accepted proposals, and count; nothing is read by the host."""
    log_bound = guided.log_bound()
    is_found = torch.zeros_like(keys, dtype=torch.bool)
    for tries in _ROUNDS:
        name = f"{purpose}/{tries}"
        noise = normal(keys, tries, seed=seed, purpose=f"{name}/value")
        heights = uniform(keys, tries, seed=seed, purpose=f"{name}/height")
        accepted, proposals = _try(guided, log_bound, noise.t(), heights.t())
        hit, place = accepted.max(dim=0)
        is_new = hit & ~is_found
        values = torch.where(is_new, proposals.gather(0, place[None])[0], values)
        tried = torch.where(hit, place + 1, tries).masked_fill(is_found, 0)
        counts[1] += is_new.sum()
        counts[2] += tried.sum()
        is_found = is_found | hit
    return values, counts


def _try(
    guided: Guided, log_bound: Tensor, noise: Tensor, heights: Tensor
) -> tuple[Tensor, Tensor]:
    """Propose; returns which proposals `[tries, m]` are accepted, and the proposals."""
    log_scale = guided.proposal_log_scale
    proposals = guided.mean + log_scale.exp() * noise
    ceiling = log_bound + gaussian_log_prob(proposals, guided.mean, log_scale)
    # A height of 0 is below every density.
    accepted = heights.log() + ceiling < guided.log_density(proposals)
    return accepted, proposals
