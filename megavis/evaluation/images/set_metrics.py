"""Metrics of sets of images or latents.

Fréchet distance: "GANs Trained by a Two Time-Scale Update Rule Converge to a Local Nash
Equilibrium" (Heusel et al., 2017), equation 6: ‖μ₁ − μ₂‖² + Tr(Σ₁ + Σ₂ − 2 (Σ₁Σ₂)^½).
Inception score: "Improved Techniques for Training GANs" (Salimans et al., 2016), section 4:
exp E KL(p(y|x) ‖ p(y)), the mean over ten random splits of the images, as in torch-fidelity.
"Improved Precision and Recall Metric for Assessing Generative Models" (Kynkäänniemi et al., 2019),
equations 1 and 2: a set's manifold is the union of balls around its vectors, with the distance to
the k-th nearest other vector as radius. Precision is the fraction of samples in the manifold of the
reference, recall the fraction of the reference in the samples' manifold.
First and second moments compare generated with held-out latents.

Legend: b images (per batch), N images, c classes, or channels of latents of h × w, d features, n
and m vectors of two sets.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megavis.parallel.random import uniform

NUM_SPLITS = 10
"""Splits of published inception scores: 50,000 images, 5,000 per split."""
NEIGHBORS = 3
"""k of published precision and recall."""
_BLOCK = 1 << 26
"""Largest number of distances in memory at once."""


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
    """Running mean and covariance of batches of vectors, in float64 and O(d²) memory."""

    def __init__(self) -> None:
        self.count = 0
        self._mean = self._scatter = torch.zeros(())

    def add(self, features: Tensor) -> None:
        """Add vectors `[b, d]`, b at least 1."""
        batch = features.double()
        count, mean = len(batch), batch.mean(0)
        if not self.count:
            self._mean = torch.zeros_like(mean)
            self._scatter = torch.zeros(len(mean), len(mean), dtype=mean.dtype, device=mean.device)
        centred = batch - mean
        # Chan, Golub and LeVeque (1979), to avoid cancellation. In place, since a matrix of 2048²
        # is 32 MiB.
        total, step = self.count + count, mean - self._mean
        self._scatter.addmm_(centred.t(), centred)
        self._scatter.addr_(step, step, alpha=self.count * count / total)
        self._mean = self._mean + step * (count / total)
        self.count = total

    def result(self) -> Gaussian:
        """Return mean and unbiased covariance (divided by count - 1), on the CPU."""
        assert self.count > 1
        return Gaussian(self._mean.cpu(), (self._scatter / (self.count - 1)).cpu())


def frechet_distance(first: Gaussian, second: Gaussian) -> float:
    """Return the squared Fréchet distance, equation 6.

    Tr (Σ₁Σ₂)^½ is computed as the sum of the singular values of Σ₁^½ Σ₂^½, which avoids square
    roots of rounding errors even if both covariances are singular.
    """
    roots = _root(first.covariance) @ _root(second.covariance)
    overlap = torch.linalg.svdvals(roots).sum()
    apart = (first.mean - second.mean).square().sum()
    return float(apart + first.covariance.trace() + second.covariance.trace() - 2.0 * overlap)


def _root(covariance: Tensor) -> Tensor:
    """Return the symmetric square root of a positive semidefinite matrix."""
    values, vectors = torch.linalg.eigh(covariance)
    return (vectors * values.clamp(min=0).sqrt()) @ vectors.t()


class RunningClassScore:
    """Running inception score, in float64.

    Args:
        num_images: N, which determines the splits.
        in_order: splits are consecutive images, as in ADM's evaluator; by default they are random.
            A split of images that are sorted by class has few classes, and exp KL is at most their
            number; one of classes in turn has equally many images of each, and a higher score than
            one of random classes.
    """

    def __init__(self, num_images: int, *, in_order: bool = False) -> None:
        self.num_splits = min(NUM_SPLITS, num_images)
        self._ends = [i * num_images // self.num_splits for i in range(1, self.num_splits + 1)]
        self._places = torch.arange(num_images)
        if not in_order:
            draws = uniform(self._places, 1, seed=0, purpose="class score")[:, 0]
            self._places = draws.argsort(stable=True)
        self._seen = 0
        self._negentropy = self._probabilities = torch.zeros(())

    def add(self, logits: Tensor) -> None:
        """Add the logits `[b, c]` of the next images."""
        log_p = logits.double().log_softmax(1)
        p = log_p.exp()
        if not self._seen:
            self._negentropy = p.new_zeros(self.num_splits)
            self._probabilities = p.new_zeros(self.num_splits, p.shape[1])
        places = self._places[self._seen : self._seen + len(p)].to(p.device)
        ends = torch.tensor(self._ends, device=p.device)
        splits = torch.searchsorted(ends, places, right=True)
        self._negentropy.index_add_(0, splits, (p * log_p).sum(1))
        self._probabilities.index_add_(0, splits, p)
        self._seen += len(p)

    def result(self) -> tuple[float, float]:
        """Return mean and standard deviation over the splits."""
        starts = [0, *self._ends[:-1]]
        sizes = torch.tensor(self._ends) - torch.tensor(starts)
        sizes = sizes.to(self._negentropy)
        marginal = self._probabilities / sizes[:, None]
        # Mean KL: the mean of Σ p log p minus Σ q log q of the mean q.
        divergence = self._negentropy / sizes - torch.xlogy(marginal, marginal).sum(1)
        scores = divergence.exp()
        return float(scores.mean()), float(scores.std(correction=0))


def precision_and_recall(
    samples: Tensor, reference: Tensor, *, neighbors: int = NEIGHBORS
) -> tuple[float, float]:
    """Return precision and recall, in [0, 1], of more than `neighbors` vectors `[n, d]` each."""
    precision = _share_inside(samples, reference, neighbors)
    return precision, _share_inside(reference, samples, neighbors)


def _share_inside(points: Tensor, centres: Tensor, neighbors: int) -> float:
    """Return the fraction of points in at least one ball around `centres`."""
    # The nearest vector to a center is itself.
    radii = [block.kthvalue(neighbors + 1).values for block in _distances(centres, centres)]
    reach = torch.cat(radii)
    inside = [(block <= reach).any(1) for block in _distances(points, centres)]
    return float(torch.cat(inside).double().mean())


def _distances(rows: Tensor, columns: Tensor) -> Iterator[Tensor]:
    """Yield blocks `[·, m]` of the distances between vectors `[n, d]` and `[m, d]`."""
    for block in rows.split(max(1, _BLOCK // len(columns))):
        yield torch.cdist(block, columns)


def moments_of(latents: Tensor) -> dict[str, list[float]]:
    """Return moments of each channel of latents `[b, c, h, w]`, over images and positions.

    `mean`; `deviation`, the standard deviation; `horizontal` and `vertical`, the correlation of
    neighbours.
    """
    wide = latents.double()
    return {
        "mean": wide.mean((0, 2, 3)).tolist(),
        "deviation": wide.transpose(0, 1).flatten(1).std(1).tolist(),
        "horizontal": _correlation(wide[..., 1:], wide[..., :-1]).tolist(),
        "vertical": _correlation(wide[..., 1:, :], wide[..., :-1, :]).tolist(),
    }


def compare(drawn: Tensor, held_out: Tensor) -> dict[str, Any]:
    """Return the moments of generated and held-out latents, and the largest differences."""
    return {
        "num_drawn": len(drawn),
        "num_held_out": len(held_out),
        "largest_difference": largest_differences(drawn, held_out),
        "drawn": moments_of(drawn),
        "held_out": moments_of(held_out),
    }


def largest_differences(latents: Tensor, held_out: Tensor) -> dict[str, float]:
    """Return the largest difference over channels between the moments of two sets of latents.

    `mean`: in standard deviations of the held-out channel; `deviation`: largest ratio minus one;
    `horizontal` and `vertical`: differences of correlations.
    """
    ours, theirs = moments_of(latents), moments_of(held_out)
    scale = torch.tensor(theirs["deviation"])
    units = {"mean": scale, "deviation": scale}
    return {
        name: float(
            ((torch.tensor(ours[name]) - torch.tensor(value)).abs() / units.get(name, 1.0)).max()
        )
        for name, value in theirs.items()
    }


def _correlation(first: Tensor, second: Tensor) -> Tensor:
    """Return the correlation of each channel, `[c]`."""
    pairs = [part.transpose(0, 1).flatten(1) for part in (first, second)]
    centred = [part - part.mean(1, keepdim=True) for part in pairs]
    product = (centred[0] * centred[1]).mean(1)
    return product / (centred[0].square().mean(1) * centred[1].square().mean(1)).sqrt()
