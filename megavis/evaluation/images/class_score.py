"""The inception score, from logits that come in batches.

"Improved Techniques for Training GANs" (Salimans et al., 2016), section 4: exp E KL(p(y|x) ‖ p(y)),
over ten splits of the images in their order, whose mean is the score.

Legend: b images of a batch, N all images, c classes.
"""

from __future__ import annotations

import torch
from torch import Tensor

NUM_SPLITS = 10
"""Of the published numbers: 50,000 images, 5,000 a split."""


class RunningClassScore:
    """Sums over each split, in float64.

    Args:
        num_images: N, which decides where the splits lie.
    """

    def __init__(self, num_images: int) -> None:
        self.num_splits = min(NUM_SPLITS, num_images)
        self._ends = [i * num_images // self.num_splits for i in range(1, self.num_splits + 1)]
        self._seen = 0
        self._negentropy = self._probabilities = torch.zeros(())

    def add(self, logits: Tensor) -> None:
        """Take in the logits `[b, c]` of the next images."""
        log_p = logits.double().log_softmax(1)
        p = log_p.exp()
        if not self._seen:
            self._negentropy = p.new_zeros(self.num_splits)
            self._probabilities = p.new_zeros(self.num_splits, p.shape[1])
        places = torch.arange(self._seen, self._seen + len(p), device=p.device)
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
        # KL is the mean of Σ p log p less Σ q log q of the mean q.
        divergence = self._negentropy / sizes - torch.xlogy(marginal, marginal).sum(1)
        scores = divergence.exp()
        return float(scores.mean()), float(scores.std(correction=0))
