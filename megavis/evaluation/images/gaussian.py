"""Features as a normal distribution, and the Fréchet distance of two.

"GANs Trained by a Two Time-Scale Update Rule Converge to a Local Nash Equilibrium" (Heusel et al.,
2017), equation 6: ‖μ₁ − μ₂‖² + Tr(Σ₁ + Σ₂ − 2 (Σ₁Σ₂)^½).

Legend: b images of a batch, d numbers of a feature vector.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Gaussian:
    """A normal distribution.

    Attributes:
        mean: float64 `[d]`.
        covariance: float64 `[d, d]`.
    """

    mean: Tensor
    covariance: Tensor


class RunningGaussian:
    """Mean and covariance of vectors that come in batches, in float64 and memory of `[d, d]`."""

    def __init__(self) -> None:
        self.count = 0
        self._mean = self._scatter = torch.zeros(())

    def add(self, features: Tensor) -> None:
        """Take in vectors `[b, d]`, b at least 1."""
        batch = features.double()
        count, mean = len(batch), batch.mean(0)
        if not self.count:
            self._mean = torch.zeros_like(mean)
            self._scatter = torch.zeros(len(mean), len(mean), dtype=mean.dtype, device=mean.device)
        centred = batch - mean
        # Chan, Golub and LeVeque (1979): sums of squares of all would cancel. In place, since a
        # matrix of 2048² is 32 MiB.
        total, step = self.count + count, mean - self._mean
        self._scatter.addmm_(centred.t(), centred)
        self._scatter.addr_(step, step, alpha=self.count * count / total)
        self._mean = self._mean + step * (count / total)
        self.count = total

    def result(self) -> Gaussian:
        """Return the distribution, its covariance over count - 1, on the CPU."""
        assert self.count > 1
        return Gaussian(self._mean.cpu(), (self._scatter / (self.count - 1)).cpu())


def frechet_distance(first: Gaussian, second: Gaussian) -> float:
    """Return equation 6.

    Tr (Σ₁Σ₂)^½ is the sum of the singular values of Σ₁^½ Σ₂^½, which no square root of rounding
    errors enters, also where fewer images than features leave both covariances singular.
    """
    roots = _root(first.covariance) @ _root(second.covariance)
    overlap = torch.linalg.svdvals(roots).sum()
    apart = (first.mean - second.mean).square().sum()
    return float(apart + first.covariance.trace() + second.covariance.trace() - 2.0 * overlap)


def _root(covariance: Tensor) -> Tensor:
    """Return the symmetric square root of a positive semidefinite matrix."""
    values, vectors = torch.linalg.eigh(covariance)
    return (vectors * values.clamp(min=0).sqrt()) @ vectors.t()
