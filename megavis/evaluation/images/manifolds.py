"""Precision and recall of samples by the neighbourhoods of their features.

"Improved Precision and Recall Metric for Assessing Generative Models" (Kynkäänniemi et al., 2019),
equations 1 and 2: a set's manifold is the union of balls around its vectors, each of which reaches
to the k-th nearest of the others. Precision is the share of samples inside the manifold of the
reference, recall the share of the reference inside that of the samples.

Legend: n, m vectors of two sets, d numbers of a vector.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

NEIGHBORS = 3
"""k of the published numbers."""
_BLOCK = 1 << 26
"""Distances in memory at once."""


def precision_and_recall(
    samples: Tensor, reference: Tensor, *, neighbors: int = NEIGHBORS
) -> tuple[float, float]:
    """Return both, in [0, 1].

    Args:
        samples: `[n, d]`, n above `neighbors`.
        reference: `[m, d]`, likewise.
        neighbors: k.
    """
    precision = _share_inside(samples, reference, neighbors)
    return precision, _share_inside(reference, samples, neighbors)


def _share_inside(points: Tensor, centres: Tensor, neighbors: int) -> float:
    """Return the share of points in at least one ball around centres."""
    # The nearest of all to a centre is itself.
    radii = [block.kthvalue(neighbors + 1).values for block in _distances(centres, centres)]
    reach = torch.cat(radii)
    inside = [(block <= reach).any(1) for block in _distances(points, centres)]
    return float(torch.cat(inside).double().mean())


def _distances(rows: Tensor, columns: Tensor) -> Iterator[Tensor]:
    """Yield the distances `[·, m]` of vectors `[n, d]` to all of `[m, d]`, some rows at a time."""
    for block in rows.split(max(1, _BLOCK // len(columns))):
        yield torch.cdist(block, columns)
